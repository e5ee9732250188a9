# SPDX-License-Identifier: Apache-2.0
"""What the runtime draws, over many seeds, against probabilities computed by NumPy from the model's own logits."""

from __future__ import annotations

import hisparse_rt as hs
import numpy as np
import pytest
import tiny
from hisparse_rt.tools.convert import convert

pytestmark = pytest.mark.slow  # of what sampling draws; its code is run by others

PROMPT = [5, 9, 200, 7, 7, 42]
DRAWS = 3000


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("statistics")
    cfg = tiny.config(vocab_size=tiny.VOCAB, eos_token_id=tiny.NULL)
    convert(tiny.write_hf(folder / "hf", cfg, tiny.weights(cfg, 2)), folder / "m.hsr", dtype="f32")
    with hs.load(folder / "m.hsr", threads=2, ram="64MiB") as opened:
        yield opened


def expected(logits: np.ndarray, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, bias=()) -> np.ndarray:
    """The distribution of the next token, by the definitions in the public header."""
    x = logits.astype(np.float64).copy()
    for token in set(PROMPT):
        x[token] = x[token] / repetition_penalty if x[token] > 0 else x[token] * repetition_penalty
    for token, value in bias:
        x[token] += value
    if top_k:
        x[np.argsort(-x, kind="stable")[top_k:]] = -np.inf
    p = np.exp((x - x.max()) / temperature)
    p /= p.sum()
    p[p < min_p * p.max()] = 0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1
    p[order[kept:]] = 0
    return p / p.sum()


@pytest.mark.parametrize("options", [
    {"temperature": 1.0},
    {"temperature": 2.5},
    {"temperature": 0.5},
    {"temperature": 1.5, "top_k": 7},
    {"temperature": 1.5, "top_p": 0.6},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.5, "repetition_penalty": 1.8},
], ids=str)
def test_frequencies(model, options):
    p = expected(model.logits(PROMPT)[-1], **options)
    counts = np.zeros(len(p))
    with model.session() as session:
        session.append(PROMPT)
        for seed in range(DRAWS):
            drawn = session.generate(max_tokens=1, seed=seed, return_details=True, **options).tokens[0]
            counts[drawn] += 1
            session.truncate(len(PROMPT))
    assert not counts[p == 0].any(), "a token that the filters exclude was drawn"
    # Pearson's statistic over tokens expected at least five times, the rest as one: mean = degrees of freedom, variance = twice that.
    often = p * DRAWS >= 5
    seen, want = np.append(counts[often], counts[~often].sum()), np.append(p[often], p[~often].sum()) * DRAWS
    seen, want = seen[want > 0], want[want > 0]
    statistic, freedom = ((seen - want) ** 2 / want).sum(), max(len(want) - 1, 1)
    assert statistic < freedom + 5 * np.sqrt(2 * freedom), (statistic, freedom)


def test_bias_moves_the_odds(model):
    logits = model.logits(PROMPT)[-1]
    token = int(np.argsort(-logits)[3])
    p = expected(logits, temperature=1.0, bias=[(token, 2.0)])
    hits = 0
    with model.session() as session:
        session.append(PROMPT)
        for seed in range(DRAWS):
            hits += session.generate(max_tokens=1, seed=seed, temperature=1.0, logit_bias={token: 2.0},
                                     return_details=True).tokens[0] == token
            session.truncate(len(PROMPT))
    assert abs(hits / DRAWS - p[token]) < 5 * np.sqrt(p[token] * (1 - p[token]) / DRAWS)
