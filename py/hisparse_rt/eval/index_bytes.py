# SPDX-License-Identifier: Apache-2.0
"""Bytes of the index that a decoded token reads at most, by the layout in docs/sparse-attention.md."""
from __future__ import annotations

import math

from ..model import ModelInfo
from ..profile import Profile
from ..session import SessionStats
from .estimates import PAGE, SKETCH_COMPONENTS, UNIT, Setting

_SEGMENT = 8192
_CENTRE = 1.75
"""Of the centres of clusters, for each token of a segment; families have a fifteenth of that."""
_FAMILIES = 15
_MEMBER = 14
"""Of a token that is looked at."""
_FAMILIES_FROM = 32  # tokens for each candidate
_BY_MEANS = ("mean", "classic", "random", "history")
"""Rules that look at the means of pages only, the last two for the covered share."""


def index_read(profile: Profile, info: ModelInfo, stats: SessionStats, calibrated: bool) -> float:
    """Of all layers and key-value heads: nothing for dense attention, means of pages, what is looked at of clusters, or all of it."""
    rule = profile.rule(calibrated)
    if profile.mode == "dense" or rule == "oracle" or not stats.index_bytes:
        return 0.0
    far, layers = far_tokens(profile, stats), [layer for layer in range(info.n_layers) if layer not in profile.dense_layers]
    if rule in _BY_MEANS:
        return float(len(layers) * info.n_kv_heads * far // PAGE * _means(info.head_dim))
    if rule != "cluster":
        return float(stats.index_bytes)
    budgets = dict(profile.layer_budgets)
    return sum(info.n_kv_heads * clusters_read(far, _candidates(profile, budgets.get(layer, profile.budget), far), info.head_dim)
               for layer in layers)


def far_tokens(profile: Profile, stats: SessionStats) -> int:
    """Tokens outside sink and window, in whole pages."""
    own = profile.session_options()
    near = own.get("sink_size", Setting.sink) + own.get("window_size", Setting.window)
    return max(0, stats.n_computed - near) // PAGE * PAGE


def clusters_read(far: int, candidates: int, head_dim: int) -> float:
    """Of one layer and key-value head, with `far` tokens outside sink and window."""
    whole, mean_value = far // _SEGMENT * _SEGMENT, head_dim + 4
    behind = (far - whole) // PAGE * (_entry(head_dim) + PAGE * SKETCH_COMPONENTS // 2)
    if candidates >= whole:
        return whole * _MEMBER + whole // PAGE * mean_value + behind
    centres = whole * _CENTRE
    if whole > _FAMILIES_FROM * candidates:
        centres = whole * _CENTRE / _FAMILIES + _FAMILIES_FROM * candidates * _CENTRE
    return centres + candidates * _MEMBER + min(candidates, whole // PAGE) * mean_value + behind


def _candidates(profile: Profile, budget: int, far: int) -> int:
    budget = max(budget, math.ceil(profile.sparse_ratio * (far // UNIT)) * UNIT)
    return profile.candidates or max(4 * budget, 4096)


def _means(head_dim: int) -> int:
    """Scales and codes of a page's mean key and mean value."""
    return 8 + 2 * head_dim


def _entry(head_dim: int) -> int:
    return -(-(_means(head_dim) + 2 * SKETCH_COMPONENTS) // 64) * 64
