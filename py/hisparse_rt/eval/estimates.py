# SPDX-License-Identifier: Apache-2.0
"""Attention of one key-value head in NumPy, and rules on its keys, values and queries: what each would read, and what that misses.

Slow and plain. Calibration classifies layers with the rules; `eval` tells with the attention what was really read.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

PAGE = 64
UNIT = 16
Array = npt.NDArray[Any]
SKETCH_COMPONENTS = 24
_SPREAD = 0.25  # of the variance in the Gaussian estimate: the exact half overshoots


@dataclass(frozen=True)
class Setting:
    """What a query reads besides the choice of a rule."""

    budget: int = 1024
    sink: int = 64
    window: int = 512


@dataclass
class Head:
    """One key-value head of a layer: keys and values [n, d], and the basis of its sketches."""

    keys: Array
    values: Array
    scale: float
    basis_k: Array | None = None
    basis_q: Array | None = None
    _kept: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = len(self.keys) // PAGE * PAGE
        self.keys, self.values = self.keys[:n], self.values[:n]
        self.pages = self.keys.reshape(-1, PAGE, self.keys.shape[1])
        self.mean = self.pages.mean(axis=1)
        self.mean_value = self.values.reshape(-1, PAGE, self.values.shape[1]).mean(axis=1)

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """What a rule computes once per head."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]


# ---- estimates: the logarithm of the unnormalised attention of each unit of 16 tokens, [heads, units] -----------------

Estimate = Callable[[Head, Array, int], Array]


def exact(head: Head, q: Array, n_pages: int) -> Array:
    return _sum_units(q @ head.keys[:n_pages * PAGE].T)


def sketch(head: Head, q: Array, n_pages: int, components: int = SKETCH_COMPONENTS) -> Array:
    assert head.basis_k is not None and head.basis_q is not None
    basis_k, basis_q, components = head.basis_k, head.basis_q, min(components, q.shape[1])
    codes = head.kept(f"sketch {components}", lambda: quantised((head.pages - head.mean[:, None]) @ basis_k[:, :components]))
    offsets = (q @ basis_q[:, :components]) @ codes[:n_pages].reshape(-1, components).T
    return _sum_units(offsets + np.repeat(q @ head.mean[:n_pages].T, PAGE, axis=1))


def gaussian(head: Head, q: Array, n_pages: int) -> Array:
    variance = head.kept("variance", lambda: head.pages.var(axis=1))
    return _each_unit(q @ head.mean[:n_pages].T + _SPREAD * (q * q) @ variance[:n_pages].T)


def quantised(z: Array, bits: int = 4) -> Array:
    """Sketch components [pages, tokens, components] as their codes mean them: one scale per page and component."""
    half = (1 << bits) / 2
    step = np.maximum(np.abs(z).max(axis=1, keepdims=True) / (half - 0.5), np.finfo(np.float32).tiny)
    codes = np.clip(np.floor(z / step + half), 0, 2 * half - 1)
    return ((codes - (half - 0.5)) * step).astype(np.float32)


def _sum_units(scores: Array) -> Array:
    return _log_sum(scores.reshape(len(scores), -1, UNIT), 2)


def _each_unit(page_scores: Array) -> Array:
    return np.repeat(page_scores, PAGE // UNIT, axis=1) + np.log(UNIT)


def _log_sum(scores: Array, axis: int) -> Array:
    peak = scores.max(axis=axis, keepdims=True)
    total: Array = np.log(np.exp(scores - peak).sum(axis=axis)) + peak.squeeze(axis)
    return total


# ---- what a query reads, and what it misses --------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Of one query and one rule; arrays by query head."""

    recall: Array
    """Share of the true attention that what was read holds."""
    covered: Array
    """The same as the rule's own estimates see it."""
    error: float
    """Squared error of the attention outputs, without virtual tokens."""
    error_virtual: float
    """The same with them."""
    norm: float
    """Squared norm of the true outputs."""


class Query:
    """One position's queries [heads, d] over a head's earlier tokens; the exact attention is computed once for all rules."""

    def __init__(self, head: Head, queries: Array, position: int, setting: Setting) -> None:
        self.head, self.setting = head, setting
        self.q = queries * np.float32(head.scale)
        self.first, self.end = setting.sink // PAGE, position // PAGE - setting.window // PAGE + 1
        scores = self.q @ head.keys[:position + 1].T
        self.total = _log_sum(scores, 1)
        self.weights = np.exp(scores - self.total[:, None])
        self.far = slice(self.first * PAGE, self.end * PAGE)
        self.near = np.ones(position + 1, bool)
        self.near[self.far] = False
        self.near_log = _log_sum(scores[:, self.near], 1)
        self.values = head.values[:position + 1]
        self.output = self.weights @ self.values

    @property
    def selectable(self) -> int:
        """Tokens outside sink and window."""
        return max(0, self.end - self.first) * PAGE

    def recall(self, slices: npt.NDArray[np.int32]) -> Array:
        """Share of the true attention, by query head, of what is always read and of these slices of 16 tokens."""
        read = self.near.copy()
        tokens = np.repeat(slices * UNIT, UNIT) + np.tile(np.arange(UNIT), len(slices))
        read[tokens] = True
        share: Array = self.weights[:, read].sum(axis=1)
        return share

    def best(self, n: int) -> Array:
        """As `recall`, of the n slices of 16 tokens that hold the most for all query heads together."""
        far = self._far_units()
        share: Array = self.weights[:, self.near].sum(axis=1) + far[:, top(far.sum(axis=0), n)].sum(axis=1)
        return share

    def _far_units(self) -> Array:
        """True attention of the slices outside sink and window."""
        return self.weights[:, self.far].reshape(len(self.q), -1, UNIT).sum(axis=2)

    def outcome(self, estimate: Estimate) -> Outcome:
        units = estimate(self.head, self.q, self.end)[:, self.first * (PAGE // UNIT):]
        logs = np.logaddexp(self.near_log, _log_sum(units, 1))
        share = np.exp(units - logs[:, None])
        chosen = top(share.sum(axis=0), self.setting.budget // UNIT)
        true = self._far_units()
        recall = self.weights[:, self.near].sum(axis=1) + true[:, chosen].sum(axis=1)
        covered = np.exp(self.near_log - logs) + share[:, chosen].sum(axis=1)
        read = self.near.copy()
        read[self.far] = np.repeat(chosen, UNIT)
        part = self.weights[:, read] @ self.values[read]
        # What is left counts with its estimate; the true weights are relative to the true total, so the estimates are put to it too.
        rest = np.exp(units[:, ~chosen] - self.total[:, None])
        value = np.repeat(self.head.mean_value[self.first:self.end], PAGE // UNIT, axis=0)[~chosen]
        plain, virtual = part / recall[:, None], (part + rest @ value) / (recall + rest.sum(axis=1))[:, None]
        return Outcome(recall, covered, _squared(plain - self.output), _squared(virtual - self.output), _squared(self.output))


def top(scores: Array, n: int) -> npt.NDArray[np.bool_]:
    """The n highest scores as a mask; lower positions first where they tie."""
    chosen = np.zeros(len(scores), bool)
    chosen[np.argsort(-scores, kind="stable")[:n]] = True
    return chosen


def _squared(x: Array) -> float:
    return float(np.square(x, dtype=np.float64).sum())
