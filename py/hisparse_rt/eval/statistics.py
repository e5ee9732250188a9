# SPDX-License-Identifier: Apache-2.0
"""Distances between the predictions of two runs over the same tokens, and how far they can be trusted."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_BLOCK = 16  # tokens drawn together: neighbours in a text are not independent
_DRAWS = 2000


@dataclass(frozen=True)
class Comparison:
    """Token by token; positive is worse."""

    kl: npt.NDArray[np.float64]
    """KL(dense || sparse)."""
    loss: npt.NDArray[np.float64]
    """How much less log-probability the true next token gets."""
    same_top: npt.NDArray[np.bool_]
    """Both find the same token the most likely one."""


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Natural logarithms of probabilities, by row."""
    values = logits.astype(np.float64)
    values -= values.max(axis=-1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=-1, keepdims=True))
    return values


def compare(dense: npt.NDArray[np.float64], sparse: npt.NDArray[np.float64], following: npt.NDArray[np.int32]) -> Comparison:
    """dense and sparse: log-probabilities [tokens, vocabulary]; following: the token that came after each."""
    rows = np.arange(len(following))
    with np.errstate(invalid="ignore"):  # 0 times infinity: a token that both rule out
        parts = np.where(dense > -np.inf, np.exp(dense) * (dense - sparse), 0.0)
    return Comparison(parts.sum(axis=1), dense[rows, following] - sparse[rows, following], dense.argmax(axis=1) == sparse.argmax(axis=1))


def interval(values: npt.NDArray[np.float64], level: float = 0.95) -> tuple[float, float]:
    """Bounds of the mean, by drawing blocks of neighbouring values anew; the same every time."""
    size = min(_BLOCK, len(values))
    n_blocks = -(-len(values) // size)
    starts = np.random.default_rng(0).integers(0, len(values) - size + 1, (_DRAWS, n_blocks))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    means = (sums[starts + size] - sums[starts]).sum(axis=1) / (n_blocks * size)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def summary(parts: list[Comparison]) -> dict[str, Any]:
    """Of several runs together."""
    kl, loss, same = (np.concatenate([getattr(part, name) for part in parts]) for name in ("kl", "loss", "same_top"))
    return {
        "tokens": len(kl), "kl_mean": float(kl.mean()), "kl_interval": interval(kl), "kl_median": float(np.median(kl)),
        "kl_p95": float(np.quantile(kl, 0.95)), "logprob_loss": float(loss.mean()), "logprob_loss_interval": interval(loss),
        "top1_agreement": float(same.mean()),
    }
