# SPDX-License-Identifier: Apache-2.0
"""How much of the true attention each rule finds, per layer and head, beside an oracle with the same budget."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..calibration import Calibration
from ..errors import InvalidError
from ..model import Model
from ..profile import Profile
from ..session import Captured, Session
from .estimates import RULES, Head, Query, Setting
from .forced import Ids, check_length

_KEPT = ("recall", "error", "error_virtual", "covered")


def recall(
    model: Model, ids: Ids, calibration: Calibration | None, scale: float, *, rules: Sequence[str], setting: Setting, queries: int,
    beyond_trained: bool = False, report: Callable[[int, int], object] | None = None,
) -> dict[str, Any]:
    """Run the model densely over `ids` and let each rule choose for `queries` positions, spread over the last quarter.

    Rules are computed here, from the model's own keys, values and queries, so that every rule sees the same ones.
    """
    if calibration is None and "sketch" in rules:
        raise InvalidError("rule sketch needs the model's calibration: run hisparse-rt calibrate first, or leave the rule out")
    info, n = model.info, len(ids)
    check_length(model, n, beyond_trained)
    n = n // 64 * 64
    if n // 4 < queries or n < 2 * (setting.sink + setting.window + 64):
        raise InvalidError(f"{n} tokens are too few for {queries} queries with a window of {setting.window}")
    stride = (n // 4) // queries
    first = n - stride * queries
    layers = []
    with model.session(context=n, kv="auto", profile=0, index="none", beyond_trained=beyond_trained) as session:
        with session.capture(queries, first=first, stride=stride) as captured:
            session.append(ids[:n])
            session.prefill()
        for layer in range(info.n_layers):
            keys, values = session.keys(layer), session.values(layer)
            share = info.n_heads // info.n_kv_heads
            heads = []
            for g in range(info.n_kv_heads):
                basis = _basis(calibration, layer, g)
                head = Head(np.ascontiguousarray(keys[:, g]), np.ascontiguousarray(values[:, g]), scale, *basis)
                heads.append(_head(head, captured.queries[layer][:, g * share:(g + 1) * share], first, stride, rules, setting))
            layers.append({"layer": layer, "heads": heads, "mean": {rule: _mean([head[rule] for head in heads]) for rule in rules}})
            if report is not None:
                report(layer + 1, info.n_layers)
    return {
        "tokens": n, "queries": queries, "budget": setting.budget, "window": setting.window, "sink": setting.sink,
        "mean": {rule: _mean([layer["mean"][rule] for layer in layers]) for rule in rules}, "layers": layers,
    }


@dataclass(frozen=True)
class Truth:
    """What it takes to tell how much attention a run really read: of `queries` positions, by what was selected for them."""

    scale: float
    queries: int

    def covered(self, session: Session, captured: Captured, first: int, stride: int, profile: Profile) -> float:
        """Mean share of the true attention that was read, over layers, heads and positions first + k * stride of what was captured."""
        info, own = session.model.info, profile.session_options()
        setting = Setting(profile.budget, own.get("sink_size", Setting.sink), own.get("window_size", Setting.window))
        share, found = info.n_heads // info.n_kv_heads, []
        for layer in range(info.n_layers):
            keys = _whole_pages(session.keys(layer))
            for g in range(info.n_kv_heads):
                # Values do not matter for what is read.
                head = Head(keys[:, g], keys[:, g], self.scale)
                for row, count in enumerate(captured.n_slices[layer, :, g]):
                    if count < 0:   # dense
                        found.append(1.0)
                        continue
                    query = Query(head, captured.queries[layer, row, g * share:(g + 1) * share], first + row * stride, setting)
                    found.append(query.recall(captured.slices[layer, row, g, :count]).mean())
        return float(np.mean(found))


def _basis(calibration: Calibration | None, layer: int, head: int) -> tuple[Any, Any]:
    return (None, None) if calibration is None else (calibration.basis_k[layer, head], calibration.basis_q[layer, head])


def _whole_pages(keys: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Keys of pages, the last one filled up: queries look at their own past alone."""
    return np.concatenate([keys, np.repeat(keys[-1:], -len(keys) % 64, axis=0)])


def _head(head: Head, queries: np.ndarray[Any, Any], first: int, stride: int, rules: Sequence[str], setting: Setting) -> dict[str, Any]:
    outcomes: dict[str, list[Any]] = {rule: [] for rule in rules}
    for row in range(len(queries)):
        query = Query(head, queries[row], first + row * stride, setting)
        for rule in rules:
            outcomes[rule].append(query.outcome(RULES[rule]))
    return {rule: {
        "recall": float(np.mean([out.recall for out in found])), "recall_of_heads": np.mean([out.recall for out in found], axis=0).tolist(),
        "covered": float(np.mean([out.covered for out in found])),
        "error": sum(out.error for out in found) / sum(out.norm for out in found),
        "error_virtual": sum(out.error_virtual for out in found) / sum(out.norm for out in found),
    } for rule, found in outcomes.items()}


def _mean(parts: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {name: float(np.mean([part[name] for part in parts])) for name in _KEPT}
