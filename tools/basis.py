# SPDX-License-Identifier: Apache-2.0
"""The basis in which the keys of one key-value head are sketched and stored, fitted to queries and keys of a text."""

from __future__ import annotations

import numpy as np

PAGE = 64


def fit_basis(queries: np.ndarray, keys: np.ndarray, mass: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A and B, float64 [d, d], with A B^T = I: z = A^T k' and q' = B^T q for keys k' about their page's mean.

    queries [m, d], of all heads that share the keys; keys [n, d]; mass [n]: attention that each key receives from afar.

    The leading components explain most of q.k' where attention looks for single tokens. Half of the weight of the queries is
    uniform and half of the weight of the keys is their plain spread, because a fit to what one text attends fails on others.
    """
    d = keys.shape[1]
    deviation = about_page_means(keys)
    received = mass[: len(deviation)]
    q = queries.astype(np.float64)
    spread_q = 0.5 * _normalised(q.T @ q) + 0.5 * np.eye(d) / d
    spread_k = 0.5 * _normalised(deviation.T @ deviation) + 0.5 * _normalised((deviation * received[:, None]).T @ deviation)
    root = np.linalg.cholesky(spread_q)
    rotation = np.linalg.eigh(root.T @ spread_k @ root)[1][:, ::-1]
    return root @ rotation, np.linalg.solve(root.T, rotation)


def about_page_means(keys: np.ndarray) -> np.ndarray:
    """Keys of whole pages less the mean of their page, float64."""
    n = len(keys) // PAGE * PAGE
    pages = keys[:n].astype(np.float64).reshape(-1, PAGE, keys.shape[1])
    return (pages - pages.mean(axis=1, keepdims=True)).reshape(n, keys.shape[1])


def _normalised(spread: np.ndarray) -> np.ndarray:
    trace = np.trace(spread)
    return spread / trace if trace > 0 else spread


def received_mass(queries: np.ndarray, positions: np.ndarray, keys: np.ndarray, scale: float, sink: int, window: int) -> np.ndarray:
    """Attention that each key receives from queries that have it outside their sink and window: float64 [n].

    queries [m, heads, d] at ascending positions [m]. A query of page p has the pages p - window / 64 + 1 to p in its window.
    """
    total = np.zeros(len(keys))
    keys = np.ascontiguousarray(keys, np.float32)
    pages = positions // PAGE
    for page in np.unique(pages):
        near = (page - window // PAGE + 1) * PAGE
        if near <= sink:
            continue
        rows = np.flatnonzero(pages == page)
        weights = attention(queries[rows], positions[rows], keys, scale)
        total[sink:near] += weights[:, :, sink:near].sum(axis=(0, 1))
    return total


def attention(queries: np.ndarray, positions: np.ndarray, keys: np.ndarray, scale: float) -> np.ndarray:
    """Softmax weights of queries [m, heads, d] at ascending positions over the keys up to the last of them: float32 [m, heads, n]."""
    m, heads, d = queries.shape
    n = int(positions[-1]) + 1
    scores = ((queries.reshape(m * heads, d) * np.float32(scale)) @ keys[:n].T).reshape(m, heads, n)
    for row, position in enumerate(positions):
        scores[row, :, position + 1 :] = -np.inf
    scores -= scores.max(axis=2, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=2, keepdims=True)
    return scores
