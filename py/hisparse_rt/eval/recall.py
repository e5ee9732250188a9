# SPDX-License-Identifier: Apache-2.0
"""How much of the true attention was really read, per layer and head, beside the most that as many tokens can hold."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InvalidError
from ..model import Model
from ..profile import Profile
from ..session import Captured, Session
from .estimates import Array, Head, Query, Setting
from .forced import Ids, Prompts, check_length

_STRIDE = 4  # tokens from one query to the next: neighbours look alike


def recall(
    model: Model, ids: Ids, scale: float, profiles: Mapping[str, Profile], *, queries: int, beyond_trained: bool = False,
    report: Callable[[int, int], object] | None = None,
) -> dict[str, Any]:
    """Decode the end of `ids` under each profile, after the same dense prompt, and look at what the runtime selected for `queries` of its
    positions: the share of the true attention that was read, and the share that the best slices, as many, would have held.
    """
    check_length(model, len(ids), beyond_trained)
    end, first = len(ids), len(ids) - _STRIDE * queries
    if first < 1024:
        raise InvalidError(f"{end} tokens are too few for {queries} queries: there must be 1024 before the first")
    found = {}
    with Prompts(model, ids[:first], end - first, profiles.values(), beyond_trained=beyond_trained) as prompts:
        for done, (name, profile) in enumerate(profiles.items()):
            with prompts.fork(profile) as session:
                with session.capture(queries, first=first, stride=_STRIDE, slices=-(-end // 16)) as captured:
                    for token in ids[first:]:
                        session.logits([int(token)])
                found[name] = [[_summary(rows) for rows in layer] for layer in shares(session, captured, scale, first, _STRIDE, profile)]
            if report is not None:
                report(done + 1, len(profiles))
    return {
        "tokens": end, "queries": queries, "layers": [
            {"layer": layer, "heads": [{name: found[name][layer][g] for name in profiles} for g in range(model.info.n_kv_heads)],
             "mean": {name: _mean(found[name][layer]) for name in profiles}} for layer in range(model.info.n_layers)],
        "mean": {name: _mean([head for layer in found[name] for head in layer]) for name in profiles},
    }


def shares(session: Session, captured: Captured, scale: float, first: int, stride: int, profile: Profile) -> Iterator[list[Array]]:
    """For each layer and key-value head, of positions first + k * stride: [positions, 2, query heads], shares of the true attention, which
    was read and which as many slices could have held. Both are 1 where a position was computed densely."""
    info, own = session.model.info, profile.session_options()
    setting = Setting(profile.budget, own.get("sink_size", Setting.sink), own.get("window_size", Setting.window))
    share = info.n_heads // info.n_kv_heads
    for layer in range(info.n_layers):
        keys, heads = _whole_pages(session.keys(layer)), []
        for g in range(info.n_kv_heads):
            head = Head(keys[:, g], keys[:, g], scale)   # values do not matter for what is read
            rows = np.ones((captured.n_slices.shape[1], 2, share))
            for row, count in enumerate(captured.n_slices[layer, :, g]):
                if count >= 0:
                    query = Query(head, captured.queries[layer, row, g * share:(g + 1) * share], first + row * stride, setting)
                    rows[row] = query.recall(captured.slices[layer, row, g, :count]), query.best(int(count))
            heads.append(rows)
        yield heads


@dataclass(frozen=True)
class Truth:
    """What it takes to tell how much attention a run really read: of `queries` positions, by what was selected for them."""

    scale: float
    queries: int

    def covered(self, session: Session, captured: Captured, first: int, stride: int, profile: Profile) -> float:
        """Mean share of the true attention that was read, over layers, heads and positions first + k * stride of what was captured."""
        return float(np.mean([rows[:, 0] for layer in shares(session, captured, self.scale, first, stride, profile) for rows in layer]))


def _whole_pages(keys: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Keys of pages, the last one filled up: queries look at their own past alone."""
    return np.concatenate([keys, np.repeat(keys[-1:], -len(keys) % 64, axis=0)])


def _summary(rows: Array) -> dict[str, Any]:
    read, best = rows.mean(axis=0)
    return {"recall": float(read.mean()), "oracle": float(best.mean()), "recall_of_heads": read.tolist(), "oracle_of_heads": best.tolist()}


def _mean(parts: list[dict[str, Any]]) -> dict[str, float]:
    return {name: float(np.mean([part[name] for part in parts])) for name in ("recall", "oracle")}
