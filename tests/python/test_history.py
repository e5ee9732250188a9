# SPDX-License-Identifier: Apache-2.0
"""Pages that are read because they were attended most so far: which ones, against a float64 reference; that nothing but tokens and
appends shows in them; and what becomes of a history when its session is cut, copied or saved."""

from __future__ import annotations

import concurrent.futures

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
NEARLY = 5e-4  # masses are shares of what attention sums up, whose terms some levels know to 1e-4


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
    own = ({"selector": "history", "budget": 64 * rules.forced} if rules.only_forced
           else {"selector": "oracle", "budget": rules.budget, "forced_history": rules.forced})
    return Profile(**own, slice_size=16 * rules.slice_units, dense_below=rules.dense_below, prefill_budget=rules.prefill_budget,
                   prefill_dense_below=rules.prefill_dense_below, virtual_tokens=False)


def session_of(model: hs.Model, rules: Rules, profile=None, **options) -> hs.Session:
    return model.session(context=4096, window_size=rules.window, sink_size=rules.sink,
                         profile=profile_of(rules) if profile is None else profile, **options)


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


@pytest.mark.slow
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


# ---- masses -----------------------------------------------------------------------------------------------------


def masses_of(session: hs.Session) -> np.ndarray:
    return np.stack([session.masses(layer) for layer in range(session.model.info.n_layers)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["beside", "prompt_runs", "only", "only_from_nothing"])
def test_masses_against_reference(paths, name):
    rules, appends = RULES[name]
    want: list = []
    sparse_reference.logits(paths / "hf", IDS[: sum(appends)], appends, rules, want)
    with hs.load(paths / "tiny.hsr", threads=2) as model, session_of(model, rules) as s:
        feed(s, appends)
        got = masses_of(s)
    for layer, heads in enumerate(want):
        assert np.abs(got[layer] - np.stack(heads, axis=1)).max() < 1e-4
    assert got.sum() == pytest.approx(sum(mass.sum() for heads in want for mass in heads), rel=1e-5)


@pytest.mark.parametrize("kv", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("selector", ["minmax", "history"])
def test_every_vote_is_a_probability(paths, kv, selector):
    """Without virtual tokens, what a row gives to all pages together is the number of query heads of the group."""
    profile = Profile(selector=selector, budget=128, forced_history=2, virtual_tokens=False)
    with hs.load(paths / "tiny-q8.hsr", threads=2) as model:
        share = model.info.n_heads // model.info.n_kv_heads
        with session_of(model, Rules(window=128), profile, kv=kv) as s:
            feed(s, [1000] + [1] * 20)
            votes = 1000 // 64 + 1 + 20   # 20 appends of one token, one of which ends a page
            assert np.allclose(masses_of(s).sum(axis=1), votes * share, rtol=NEARLY)


@pytest.mark.parametrize("computed_before", [False, True])
def test_sampled_tokens_vote_and_none_twice(paths, computed_before):
    """The last token of a prompt, computed again for a request, does not count again, and the request finds what it found."""
    rules = RULES["beside"][0]
    with hs.load(paths / "tiny.hsr", threads=2) as model, session_of(model, rules) as s:
        s.append(IDS[:1000])
        if computed_before:
            s.prefill()
        tokens = [int(token) for token in s.generate(max_tokens=24, ignore_eos=True, temperature=0.0, return_details=True).tokens]
        got = masses_of(s)
        assert s.stats().n_computed == 1023
    want: list = []
    rows = sparse_reference.logits(paths / "hf", (IDS[:1000] + tokens)[:1023], [1000], rules, want)
    assert list(rows[999:, : model.info.tokenizer_size].argmax(axis=1)) == tokens
    assert max(np.abs(got[layer] - np.stack(heads, axis=1)).max() for layer, heads in enumerate(want)) < 1e-4


def test_sessions_that_do_not_ask_keep_nothing(paths):
    without = Profile(selector="oracle", virtual_tokens=False)
    with hs.load(paths / "tiny-q8.hsr", threads=2) as model, session_of(model, Rules(), without) as s:
        feed(s, [700, 1])
        assert not masses_of(s).any()
        s.set_profile(Profile(selector="history", budget=64))
        s.logits(IDS[701:702])
        masses = masses_of(s)
        assert np.allclose(masses.sum(axis=1), model.info.n_heads // model.info.n_kv_heads, rtol=NEARLY)
        s.set_profile(0)
        s.logits(IDS[702:703])
        assert np.array_equal(masses_of(s), masses)


# ---- sessions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forced", [1, 64])
def test_budget_of_everything_is_dense(paths, forced):
    """To the bit, in a plain format; also where only budget and forced pages together are everything."""
    rules = Rules(budget=2048 if forced == 1 else 64, window=128, forced=forced)
    appends = [LENGTH - 30] + [1] * 30
    with hs.load(paths / "tiny-q8.hsr", threads=2) as model:
        dense = run(model, appends, rules, profile=0)
        assert np.array_equal(run(model, appends, rules, kv="bf16"), dense)
        assert np.array_equal(run(model, appends, rules, Profile(selector="history", budget=1 << 20), kv="bf16"), dense)


def test_a_fork_goes_on_as_its_origin(paths):
    rules, appends = RULES["beside"]
    with hs.load(paths / "tiny-q8.hsr", threads=2) as model, session_of(model, rules) as s:
        want = feed(s, appends)
        s.truncate(0)
        feed(s, appends[:11])
        with s.fork() as f:
            assert np.array_equal(masses_of(f), masses_of(s))
            start = sum(appends[:11])
            for session in (f, s):
                assert np.array_equal(feed(session, appends[11:], start), want[start:])
            f.logits(IDS[:1])
            assert not np.array_equal(masses_of(f), masses_of(s))
        with s.fork() as f:   # a request computes the last token again, by the list that was there
            assert f.generate(max_tokens=8, temperature=0.0, ignore_eos=True) == s.generate(max_tokens=8, temperature=0.0, ignore_eos=True)
            assert np.array_equal(masses_of(f), masses_of(s))


def test_truncate_keeps_the_mass_of_what_stays(paths):
    """Pages behind the cut begin anew; the others keep what they got, from rows behind the cut, too."""
    rules, _ = RULES["beside"]
    with hs.load(paths / "tiny-q8.hsr", threads=2) as model, session_of(model, rules) as s:
        feed(s, [1000] + [1] * 100)
        before = masses_of(s)
        s.truncate(1050)
        after = masses_of(s)
        assert after.shape[1] == 17 and before.shape[1] == 18
        assert np.array_equal(after, before[:, :17])
        s.logits(IDS[1050:1200])   # votes: the ends of pages 16, 17 and the last row
        share = model.info.n_heads // model.info.n_kv_heads
        again = masses_of(s)
        assert np.allclose(again.sum(axis=1) - after.sum(axis=1), 3 * share, rtol=1e-3)
        assert again[:, 17].max() < share * 3
        s.truncate(0)
        feed(s, [1000])
        fresh = masses_of(s)
        s.rebuild()
        s.prefill()
        assert np.array_equal(masses_of(s), fresh)
    with hs.load(paths / "tiny-q8.hsr", threads=2) as model, session_of(model, rules) as s:
        feed(s, [1000])
        assert np.array_equal(masses_of(s), fresh)


def test_a_restored_session_begins_anew(paths, tmp_path):
    rules, _ = RULES["only"]
    with hs.load(paths / "tiny-q8.hsr", threads=2) as model:
        with session_of(model, rules) as s:
            feed(s, [1000] + [1] * 10)
            s.save(tmp_path / "book.hskv")
            want = masses_of(s)
        with model.restore(tmp_path / "book.hskv", profile=profile_of(rules)) as s:
            assert want.any() and not masses_of(s).any()
            row = s.logits(IDS[1010:1011])[0]
            share = model.info.n_heads // model.info.n_kv_heads
            assert np.isfinite(row).all() and np.allclose(masses_of(s).sum(axis=1), share, rtol=NEARLY)
            # Nothing was attended yet: of equal pages the first ones are read, behind the sink and before the window.
            assert (masses_of(s)[:, 1:5] > 0).all() and not masses_of(s)[:, 5:14].any()
            s.rebuild()
            s.prefill()
            assert np.allclose(masses_of(s).sum(axis=1), (1011 // 64 + 1) * share, rtol=NEARLY)


def test_what_grows_keeps_its_masses(paths):
    """Token by token past the size of the first table, as in one that was large from the start."""
    rules = Rules(forced=2, only_forced=True)
    with hs.load(paths / "tiny-q8.hsr", threads=2) as model:
        with model.session(context=9000, beyond_trained=True, window_size=64, sink_size=64, profile=profile_of(rules)) as s:
            ids = (IDS * 4)[:4200]
            s.append(ids[:4000])
            s.prefill()
            small = masses_of(s)
            for token in ids[4000:]:
                s.append([token])
                s.prefill()
            grown = masses_of(s)
            assert small.shape[1] == 63 and grown.shape[1] == 66
            assert np.allclose(grown.sum(axis=1), (4000 // 64 + 1 + 200) * (model.info.n_heads // model.info.n_kv_heads), rtol=1e-3)


@pytest.mark.parametrize("mode", ["beside", "only"])
@pytest.mark.parametrize("kv", ["bf16", pytest.param("int8", marks=pytest.mark.slow), pytest.param("f32", marks=pytest.mark.slow)])
def test_squeezed_is_resident(tmp_path_factory, tmp_path, mode, kv):
    """Pages are heard while they are in memory, and however often they come and go."""
    folder = tmp_path_factory.mktemp("squeezed")
    cfg = tiny.config(num_hidden_layers=3, head_dim=64, max_position_embeddings=8192)
    convert(tiny.write_hf(folder / "hf", cfg, tiny.weights(cfg, 9)), folder / "m.hsr", dtype="q8")
    ids = [int(i) for i in np.random.default_rng(3).integers(3, 300, 6000)]
    profile = (Profile(selector="minmax", budget=256, forced_history=6, virtual_tokens=False, prefill_budget=256, prefill_dense_below=1024)
               if mode == "beside" else Profile(selector="history", budget=640))
    options = {"kv": kv, "profile": profile, "window_size": 128, "sink_size": 64, "rollback_tokens": 64}

    def result(session):
        session.append(ids)
        tokens = list(session.generate(max_tokens=16, ignore_eos=True, return_details=True).tokens)
        return tokens, session.logits([5]), masses_of(session)

    with hs.load(folder / "m.hsr", threads=2) as model, model.session(**options) as session:
        want = result(session)
    (tmp_path / "cold").mkdir()
    hot = {"bf16": 7, "f32": 11, "int8": 5}[kv]
    with hs.load(folder / "m.hsr", threads=1, chunk=128, hot=f"{hot}MiB", cold=tmp_path / "cold", cold_size="64MiB") as model:
        with model.session(**options) as session:
            got = result(session)
            stats = model.stats()
    assert stats.cold_evictions > 0 and stats.cold_misses > 0 and want[2].any()
    assert got[0] == want[0] and np.array_equal(got[1], want[1]) and np.array_equal(got[2], want[2])


def test_sessions_together_are_as_alone(paths):
    """Steps that are shared by sessions with and without a history."""
    rules = RULES["beside"][0]
    profiles = [profile_of(rules), 0, profile_of(RULES["only"][0]),
                Profile(selector="minmax", budget=128, forced_history=1, virtual_tokens=False)]
    options = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    with hs.load(paths / "tiny-q8.hsr", threads=2, chunk=100, max_batch=128) as model:
        def generate(session):
            return session.generate(**options, return_details=True).tokens, masses_of(session)

        alone = []
        for i, profile in enumerate(profiles):
            with session_of(model, rules, profile) as s:
                s.append(IDS[i : 900 + 70 * i])
                alone.append(generate(s))
        sessions = [session_of(model, rules, profile) for profile in profiles]
        for i, s in enumerate(sessions):
            s.append(IDS[i : 900 + 70 * i])
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            together = list(pool.map(generate, sessions))
        for s in sessions:
            s.close()
    for got, want in zip(together, alone, strict=True):
        assert list(got[0]) == list(want[0]) and np.array_equal(got[1], want[1])
