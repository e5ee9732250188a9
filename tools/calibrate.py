# SPDX-License-Identifier: Apache-2.0
"""Calibration: run a model over a text, fit the bases of its keys, and see in which layers sketches and virtual tokens help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..calibration import Calibration, beside, write_calibration
from ..errors import HisparseError, InvalidError
from ..eval.estimates import Head, Outcome, Query, Setting, gaussian, sketch
from .basis import fit_basis, received_mass
from .calibration_text import library_docstrings
from .hsr_file import HsrFile

if TYPE_CHECKING:
    from ..model import Model

TOKENS = 12288
LEAST_TOKENS = 2048
_FITTED = 3 / 4  # of the text; queries of the rest measure
_QUERY_BYTES = 512 << 20
_LEAST_STRIDE = 5  # odd, so that queries fall on all places of a page
_MEASURED = 16  # queries per head
_BUDGET = 512
_GAP = 0.04  # of the attention: a layer where the Gaussian misses more wants sketches
_CHARACTERS = 8  # of a token; it rarely has more

Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class LayerFacts:
    """What was measured in one layer: shares of attention, and errors relative to the output."""

    recall_sketch: float
    recall_gaussian: float
    error: float
    error_virtual: float


def default_ids(model: Model, text: str | None = None, tokens: int = TOKENS) -> np.ndarray:
    """Token ids to calibrate with: of `text`, or of the default text; at most `tokens`, and no more than the model was trained for."""
    n = min(tokens, model.info.context_length)
    try:
        return model.encode(library_docstrings(_CHARACTERS * n) if text is None else text)[:n]
    except HisparseError as error:
        raise InvalidError(f"calibration needs the model's tokenizer: {error}") from error


def calibrate_file(path: str, progress: Progress | None = None, **engine: Any) -> bool:
    """Calibrate a model file with the default text and put the result beside it. False, and nothing is done, for a model that has no
    tokenizer or was trained for too few tokens. engine: options of Model, such as threads."""
    from ..model import Model

    with Model(path, **engine) as model:
        if model.info.context_length < LEAST_TOKENS or model.metadata("tokenizer.huggingface.json") is None:
            return False
        calibration, _ = calibrate(model, default_ids(model), progress)
    write_calibration(beside(path), calibration)
    return True


def attention_scale(model: Model) -> float:
    """What the model multiplies q.k with."""
    with HsrFile(model.file) as file:
        return float(file.metadata["hisparse.attention_scale"])


def calibrate(model: Model, ids: np.ndarray, progress: Progress | None = None) -> tuple[Calibration, list[LayerFacts]]:
    """Fit to the attention of `ids`. progress(done, total) counts tokens, each once computed and once evaluated."""
    info, n, scale = model.info, len(ids), attention_scale(model)
    if n < LEAST_TOKENS:
        raise InvalidError(f"calibration needs at least {LEAST_TOKENS} tokens; there are {n}")
    report = progress or (lambda done, total: None)
    per_query = 4 * info.n_layers * info.n_heads * info.head_dim
    stride = max(_LEAST_STRIDE, -(-n * per_query // _QUERY_BYTES)) | 1
    positions = np.arange(stride - 1, n, stride)
    fits = []
    with model.session(context=n, kv="auto", profile=0, index="none") as session:
        with session.capture(len(positions), first=stride - 1, stride=stride) as captured:
            session.append(ids)
            session.prefill(lambda done, total: report(done, 2 * n))
        for layer in range(info.n_layers):
            fits.append(_fit_layer(captured.queries[layer], positions, session.keys(layer), session.values(layer), scale, layer))
            report(n + n * (layer + 1) // info.n_layers, 2 * n)
    arrays = [np.stack([getattr(fit, name) for fit in fits]).astype(np.float32) for name in ("basis_k", "basis_q", "mean_k", "mean_v")]
    facts = [fit.facts for fit in fits]
    virtual = np.array([fact.error_virtual < fact.error for fact in facts])
    gap = np.array([fact.recall_sketch - fact.recall_gaussian for fact in facts], np.float32)
    return Calibration(model.metadata("hisparse.source") or "", *arrays, virtual=virtual, gap=gap, sketched=gap > _GAP), facts


@dataclass(frozen=True)
class _Fit:
    basis_k: np.ndarray
    basis_q: np.ndarray
    mean_k: np.ndarray
    mean_v: np.ndarray
    facts: LayerFacts


def _fit_layer(queries: np.ndarray, positions: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float, layer: int) -> _Fit:
    """queries [m, heads, d]; keys and values [n, kv heads, d]."""
    for name, array in (("queries", queries), ("keys", keys), ("values", values)):
        if not np.isfinite(array).all():
            raise InvalidError(f"{name} of layer {layer} are not finite: the model cannot be calibrated")
    n, kv_heads, d = keys.shape
    share, fitted = queries.shape[1] // kv_heads, int(n * _FITTED)
    bases, outcomes = [], []
    for head in range(kv_heads):
        own = queries[:, head * share : (head + 1) * share]
        used = positions < fitted
        mass = received_mass(own[used], positions[used], keys[:fitted, head], scale, Setting.sink, Setting.window)
        bases.append(fit_basis(own[used].reshape(-1, d), keys[:fitted, head], mass))
        a, b = (basis.astype(np.float32) for basis in bases[-1])
        measured = Head(np.ascontiguousarray(keys[:, head]), np.ascontiguousarray(values[:, head]), scale, a, b)
        outcomes += _measure(measured, own[~used], positions[~used])
    return _Fit(
        np.stack([a for a, _ in bases]), np.stack([b for _, b in bases]), keys.mean(axis=0, dtype=np.float64),
        values.mean(axis=0, dtype=np.float64), _facts(outcomes),
    )  # fmt: skip


def _measure(head: Head, queries: np.ndarray, positions: np.ndarray) -> list[tuple[Outcome, Outcome]]:
    """Outcomes of the sketch and of the Gaussian for some of the queries, which the basis was not fitted to."""
    whole = np.flatnonzero(positions < len(head.keys))
    rows = whole[np.linspace(0, len(whole) - 1, min(_MEASURED, len(whole))).astype(int)]
    setting = Setting(min(_BUDGET, len(head.keys) // 8))
    found = (Query(head, queries[row], int(positions[row]), setting) for row in rows)
    return [(query.outcome(sketch), query.outcome(gaussian)) for query in found]


def _facts(outcomes: list[tuple[Outcome, Outcome]]) -> LayerFacts:
    norm = sum(by_sketch.norm for by_sketch, _ in outcomes)
    return LayerFacts(
        float(np.mean([by_sketch.recall.mean() for by_sketch, _ in outcomes])),
        float(np.mean([by_gaussian.recall.mean() for _, by_gaussian in outcomes])),
        sum(by_sketch.error for by_sketch, _ in outcomes) / norm,
        sum(by_sketch.error_virtual for by_sketch, _ in outcomes) / norm,
    )
