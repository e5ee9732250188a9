# SPDX-License-Identifier: Apache-2.0
"""Pages that are read because they were attended most so far: which ones, against a float64 reference; that nothing but tokens and
appends shows in them; and what becomes of a history when its session is cut, copied or saved."""

from __future__ import annotations

import hisparse_rt as hs
import numpy as np
import pytest
import sparse_reference
import tiny
from hisparse_rt.profile import Profile
from hisparse_rt.tools.convert import convert
from sparse_reference import Rules

LENGTH = 1300
IDS = [int(i) for i in np.random.default_rng(11).integers(3, 300, LENGTH)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("history")
    cfg = tiny.config(max_position_embeddings=4096)
    tiny.write_hf(folder / "hf", cfg, tiny.weights(cfg, 5))
    convert(folder / "hf", folder / "tiny.hsr", dtype="f32")
    convert(folder / "hf", folder / "tiny-q8.hsr", dtype="q8")
    return folder


def profile_of(rules: Rules) -> Profile:
    """`history` has its pages as a budget, other selectors beside it."""
    return Profile(selector="history" if rules.only_forced else "oracle", budget=64 * rules.forced if rules.only_forced else rules.budget,
                   forced_history=0 if rules.only_forced else rules.forced, slice_size=16 * rules.slice_units, dense_below=rules.dense_below,
                   prefill_budget=rules.prefill_budget, prefill_dense_below=rules.prefill_dense_below, virtual_tokens=False)


def session_of(model: hs.Model, rules: Rules, profile=None, **options) -> hs.Session:
    return model.session(context=4096, window_size=rules.window, sink_size=rules.sink, profile=profile_of(rules) if profile is None else profile,
                         **options)


def feed(session: hs.Session, appends: list[int], start: int = 0) -> np.ndarray:
    rows = []
    for length in appends:
        rows.append(session.logits(IDS[start : start + length]))
        start += length
    return np.concatenate(rows)


def run(model: hs.Model, appends: list[int], rules: Rules, profile=None, **options) -> np.ndarray:
    with session_of(model, rules, profile, **options) as s:
        return feed(s, appends)


RULES = {
    "beside": (Rules(budget=64, window=128, forced=3), [LENGTH - 30] + [1] * 30),
    "one_page_window": (Rules(budget=32, forced=2), [700, LENGTH - 720] + [1] * 20),
    "wide_slices": (Rules(budget=128, slice_units=4, window=192, sink=0, forced=4), [600, 300, LENGTH - 920] + [1] * 20),
    "prompt_runs": (Rules(budget=64, window=128, prefill_budget=192, prefill_dense_below=500, forced=5), [700, LENGTH - 720] + [1] * 20),
    "only": (Rules(window=128, forced=4, only_forced=True), [LENGTH - 30] + [1] * 30),
    "only_from_nothing": (Rules(forced=3, only_forced=True), [1] * 40 + [700, 5]),
}


@pytest.mark.parametrize("name", RULES)
def test_against_reference(paths, name):
    rules, appends = RULES[name]
    want = sparse_reference.logits(paths / "hf", IDS[: sum(appends)], appends, rules)
    with hs.load(paths / "tiny.hsr", threads=2) as model:
        got = run(model, appends, rules)
    assert np.abs(got - want).max() < 1e-3
    without = sparse_reference.logits(paths / "hf", IDS[: sum(appends)], appends, Rules(**{**vars(rules), "forced": 0}))
    assert np.abs(got - without).max() > 1e-2


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in ("prompt_runs", "only") else pytest.mark.slow) for name in RULES])
@pytest.mark.parametrize("options", [{"threads": 1}, {"chunk": 64}, {"chunk": 100}, {"debug_async": True}, {"max_batch": 128}],
                         ids=lambda options: "-".join(options))
def test_bits_do_not_depend_on_how_it_is_computed(paths, name, options):
    rules, appends = RULES[name]
    with hs.load(paths / "tiny-q8.hsr", threads=2) as model:
        want = run(model, appends, rules)
    with hs.load(paths / "tiny-q8.hsr", **{"threads": 2, **options}) as model:
        assert np.array_equal(run(model, appends, rules), want)
