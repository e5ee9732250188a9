# SPDX-License-Identifier: Apache-2.0
"""Sparse attention in float64, straight from the rules: which tokens a row attends, as a mask over the dense reference. Exact
scores stand in for every selector's estimates, so this is the oracle of the oracle selector."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import reference
from history_reference import History

PAGE, UNIT, RUN = 64, 16, 128


@dataclass(frozen=True)
class Rules:
    """What a profile and a session say; tokens except `slice_units`."""

    window: int = 64
    sink: int = 64
    budget: int = 64
    slice_units: int = 1
    dense_below: int = 0
    prefill_budget: int = 0
    prefill_dense_below: int = 0
    forced: int = 0
    """Pages of the highest mass so far, beside the budget."""
    only_forced: bool = False
    """Selector history: nothing else is selected."""
    ratio: float = 0
    layer_budgets: tuple[tuple[int, int], ...] = ()
    virtual: tuple[bool, ...] = ()
    """By layer: in decode rows, what is not attended counts with its own weight and its page's mean value."""

    def of_layer(self, layer: int) -> Rules:
        return replace(self, budget=dict(self.layer_budgets).get(layer, self.budget), virtual=self.virtual[layer : layer + 1])


def logits(folder, ids: list[int], appends: list[int], rules: Rules, masses: list[list[np.ndarray]] | None = None) -> np.ndarray:
    """Logits [T, vocab]; `appends` are the lengths of the pieces in which the session was given the ids. masses: receives those of each
    layer and kv head in the end."""
    config, tensors = reference.load(folder)
    inv_freq, factor = reference.inverse_frequencies(config, len(ids))
    eps = config.get("rms_norm_eps", 1e-6)
    x = tensors["model.embed_tokens.weight"][ids]
    runs = whole_runs(appends, rules)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        histories: list[History] = []
        normed = reference._norm(x, tensors[layer + "input_layernorm.weight"], eps)
        x = x + _attention(config, tensors, layer, normed, inv_freq, factor, runs, rules.of_layer(i), appends, histories)
        if masses is not None:
            masses.append([history.mass for history in histories])
        x = x + reference._mlp(tensors, layer + "mlp.", reference._norm(x, tensors[layer + "post_attention_layernorm.weight"], eps))
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    return reference._norm(x, tensors["model.norm.weight"], eps) @ head.T


def whole_runs(appends: list[int], rules: Rules) -> set[int]:
    """First positions of the 128-token runs that share a selection: whole inside one append, its last token not counted."""
    runs, start = set(), 0
    for length in appends if rules.window > PAGE else ():
        end = start + length - 1
        first = -(-start // RUN) * RUN
        runs |= set(range(first, end - RUN + 1, RUN))
        start += length
    return runs


def _attention(config, tensors, layer, x, inv_freq, factor, runs, rules, appends, histories) -> np.ndarray:
    n, d, heads = len(x), reference.head_dim(config), config["num_attention_heads"]
    names = [f"{layer}self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    q, k, v = (reference._linear(tensors, name, x).reshape(n, -1, d) for name in names[:3])
    q, k = reference._rotate(q, inv_freq, factor), reference._rotate(k, inv_freq, factor)
    share = heads // k.shape[1]
    out = np.empty((n, heads, d))
    for g in range(k.shape[1]):
        group = range(g * share, (g + 1) * share)
        scores = np.stack([q[:, h] @ k[:, g].T / math.sqrt(d) for h in group])
        visible = np.tril(np.ones((n, n), bool))
        history = History(appends, rules)
        histories.append(history)
        for row in range(n):
            _restrict(visible, scores, row, runs, rules, history.forced(row))
            history.add(row, scores, visible)
        counted = visible | _virtual_rows(n, runs, rules) & np.tri(n, dtype=bool)
        for h in group:
            s = np.where(counted, scores[h - g * share], -np.inf)
            weight = np.exp(s - s.max(axis=-1, keepdims=True))
            weight /= weight.sum(axis=-1, keepdims=True)
            out[:, h] = np.where(visible, weight, 0) @ v[:, g] + np.where(visible, 0, weight) @ _page_means(v[:, g])
    return reference._linear(tensors, names[3], out.reshape(n, heads * d))


def _virtual_rows(n: int, runs: set[int], rules: Rules) -> np.ndarray:
    return np.array([any(rules.virtual) and row // RUN * RUN not in runs for row in range(n)])[:, None]


def _page_means(v: np.ndarray) -> np.ndarray:
    """Of each token's page."""
    return np.concatenate([np.broadcast_to(page.mean(axis=0), page.shape) for page in np.split(v, range(PAGE, len(v), PAGE))])


def _restrict(visible: np.ndarray, scores: np.ndarray, row: int, runs: set[int], rules: Rules, forced: list[int]) -> None:
    """Clear what `row` does not attend."""
    run, most_forced = row // RUN * RUN, rules.forced
    if run in runs:
        if row > run:   # the run's first row has its selection already
            begin, end = _selectable(run, rules)
            visible[row, begin:end] = visible[run, begin:end]
            return
        if rules.prefill_budget == 0 or run < -(-rules.prefill_dense_below // RUN) * RUN:
            return
        first, votes, budget, forced = run, range(run, run + RUN, 8), rules.prefill_budget, []
        most_forced = 0
    else:
        if row < rules.dense_below:
            return
        first, votes, budget = row, (row,), 0 if rules.only_forced else rules.budget
    begin, end = _selectable(first, rules)
    if first == row:
        budget = max(budget, math.ceil(float(np.float32(rules.ratio)) * ((end - begin) // UNIT)) * UNIT)
    if end - begin <= budget + most_forced * PAGE:
        return
    worth = sum(_worth(scores, vote, begin, end, rules) for vote in votes)
    slices = worth.reshape(-1, rules.slice_units).sum(axis=1)
    of_forced = np.isin(np.arange(begin, end, UNIT * rules.slice_units) // PAGE, forced)
    slices[of_forced] = -1
    chosen = np.argsort(-slices, kind="stable")[: budget // (UNIT * rules.slice_units)]
    keep = np.zeros(len(slices), bool)
    keep[chosen] = True
    keep |= of_forced
    visible[row, begin:end] = np.repeat(keep, UNIT * rules.slice_units)


def _selectable(row: int, rules: Rules) -> tuple[int, int]:
    """First and end of the tokens among which the row may select."""
    return rules.sink, max((row // PAGE + 1 - rules.window // PAGE) * PAGE, rules.sink)


def _worth(scores: np.ndarray, row: int, begin: int, end: int, rules: Rules) -> np.ndarray:
    """Probability of each selectable unit, summed over the group's heads. A run's voters see their own windows, and the page between
    the run's selection and their window not at all: it is attended anyway."""
    _, window = _selectable(row, rules)
    seen = np.zeros(scores.shape[-1], bool)
    seen[: rules.sink] = seen[begin:end] = seen[end : row + 1] = True
    total = np.zeros((end - begin) // UNIT)
    assert window >= end
    for head in scores:
        s = np.where(seen, head[row], -np.inf)
        p = np.exp(s - s.max())
        p /= p.sum()
        total += p[begin:end].reshape(-1, UNIT).sum(axis=1)
    return total
