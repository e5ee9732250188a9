# SPDX-License-Identifier: Apache-2.0
"""Sparse attention: what a row attends, against a float64 reference; and that chunks, batches and threads never show."""

from __future__ import annotations

import logging
from dataclasses import replace

import hisparse_rt as hs
import numpy as np
import pytest
import sparse_reference
import tiny
from hisparse_rt.calibration import Calibration, read_calibration, write_calibration
from hisparse_rt.profile import Profile
from hisparse_rt.tools.convert import convert
from sparse_reference import Rules

LENGTH = 1600
IDS = [int(i) for i in np.random.default_rng(7).integers(3, 300, LENGTH)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sparse")
    cfg = tiny.config(max_position_embeddings=4096)
    tiny.write_hf(folder / "hf", cfg, tiny.weights(cfg, 5))
    convert(folder / "hf", folder / "tiny.hsr", dtype="f32")
    convert(folder / "hf", folder / "tiny-q8.hsr", dtype="q8")
    for name, virtual in (("both", [1, 1]), ("first", [1, 0]), ("none", [0, 0])):
        write_identity(folder / "tiny-q8.hsr", folder / f"{name}.hsrcal", virtual)
    return folder


def write_identity(model, path, virtual: list[int]) -> None:
    """A calibration that changes no key: sketches are of the keys' own components."""
    with hs.load(model, calibration=False, threads=1) as loaded:
        info, source = loaded.info, loaded.metadata("hisparse.source")
    layers, heads, d = info.n_layers, info.n_kv_heads, info.head_dim
    basis = np.broadcast_to(np.eye(d, dtype=np.float32), (layers, heads, d, d))
    mean = np.zeros((layers, heads, d), np.float32)
    write_calibration(path, Calibration(source, basis, basis, mean, mean, np.array(virtual, bool), np.zeros(layers, np.float32)))


def profile_of(rules: Rules, **changes) -> Profile:
    return Profile(**{"selector": "oracle", "budget": rules.budget, "slice_size": 16 * rules.slice_units, "dense_below": rules.dense_below,
                      "prefill_budget": rules.prefill_budget, "prefill_dense_below": rules.prefill_dense_below, "virtual_tokens": False,
                      "sparse_ratio": rules.ratio, "layer_budgets": rules.layer_budgets, **changes})


def run(model: hs.Model, appends: list[int], rules: Rules, profile=None, **options) -> np.ndarray:
    with model.session(context=4096, window_size=rules.window, sink_size=rules.sink,
                       profile=profile_of(rules) if profile is None else profile, **options) as s:
        rows, start = [], 0
        for length in appends:
            rows.append(s.logits(IDS[start : start + length]))
            start += length
        stats = s.stats()
        assert stats.pages_sealed > 0
        return np.concatenate(rows)


RULES = {
    "decode": (Rules(budget=64), [LENGTH - 40] + [1] * 40),
    "wide_slices": (Rules(budget=128, slice_units=4, window=128), [LENGTH - 20] + [1] * 20),
    "no_sink": (Rules(budget=80, sink=0, window=192), [LENGTH - 20] + [1] * 20),
    "dense_below": (Rules(budget=64, dense_below=LENGTH - 10), [LENGTH - 40] + [1] * 40),
    "prompt_runs": (Rules(budget=64, window=128, prefill_budget=192, prefill_dense_below=500), [700, 500, LENGTH - 1210] + [1] * 10),
    "ratio": (Rules(budget=16, ratio=0.07), [LENGTH - 20] + [1] * 20),
    "ratio_of_80_units": (Rules(budget=16, ratio=0.1), [1380] + [1] * 20),   # 0.1f is a little more than a tenth
    "layer_budgets": (Rules(budget=64, layer_budgets=((1, 256),)), [LENGTH - 20] + [1] * 20),
    "prompt_from_start": (Rules(budget=1 << 20, window=256, prefill_budget=256), [LENGTH]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_against_reference(paths, name):
    rules, appends = RULES[name]
    want = sparse_reference.logits(paths / "hf", IDS[: sum(appends)], appends, rules)
    with hs.load(paths / "tiny.hsr", threads=2) as model:
        got = run(model, appends, rules)
        dense = run(model, appends, rules, profile=0)
    assert np.abs(got - want).max() < 1e-3
    assert np.abs(got - dense).max() > 1e-2   # something was left out


@pytest.mark.slow
@pytest.mark.parametrize("virtual", ["both", "first", "none"])
def test_virtual_tokens_of_each_layer_against_reference(paths, virtual):
    """Sketches of 4 bits are not the keys, but far nearer than leaving out what they stand for; and layers that virtual tokens do not help
    go without."""
    layers = {"both": (True, True), "first": (True, False), "none": (False, False)}
    rules, appends = Rules(budget=64, dense_below=LENGTH - 40), [LENGTH - 40] + [1] * 40
    want = {name: sparse_reference.logits(paths / "hf", IDS, appends, replace(rules, virtual=of)) for name, of in layers.items()}
    profile = profile_of(rules, selector="sketch", virtual_tokens=True)
    with hs.load(paths / "tiny.hsr", threads=2, calibration=paths / f"{virtual}.hsrcal") as model:
        got = run(model, appends, rules, profile)
        if virtual == "none":
            assert np.array_equal(got, run(model, appends, rules, replace(profile, virtual_tokens=False)))
    error = {name: np.abs(got - rows)[-40:].mean() for name, rows in want.items()}
    assert all(1.5 * error[virtual] < error[other] for other in layers if other != virtual), error


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "prompt_runs" else pytest.mark.slow) for name in RULES])
@pytest.mark.parametrize("options", [{"threads": 1}, {"chunk": 64}, {"chunk": 100}, {"debug_async": True}, {"max_batch": 128}],
                         ids=lambda options: "-".join(options))
def test_bits_do_not_depend_on_how_it_is_computed(paths, name, options):
    rules, appends = RULES[name]
    with hs.load(paths / "tiny-q8.hsr", threads=2) as model:
        want = run(model, appends, rules)
    with hs.load(paths / "tiny-q8.hsr", **{"threads": 2, **options}) as model:
        assert np.array_equal(run(model, appends, rules), want)


@pytest.mark.parametrize("selector", ["oracle", "sketch", "cluster"])
def test_budget_of_everything_is_dense(paths, selector):
    """To the bit, in a plain format."""
    rules = Rules(budget=2048, window=128, prefill_budget=2048)
    appends = [LENGTH - 30] + [1] * 30
    with hs.load(paths / "tiny-q8.hsr", threads=2, calibration=paths / "both.hsrcal") as model:
        everything = profile_of(rules, selector=selector, virtual_tokens=True, candidates=32)
        assert np.array_equal(run(model, appends, rules, everything), run(model, appends, rules, profile=0))


@pytest.mark.slow
def test_budget_of_everything_is_dense_beyond_a_segment(paths):
    """Whatever the clusters say: candidates are fewer than the budget."""
    ids = [IDS[i % LENGTH] for i in range(9000)]
    everything = Profile(selector="cluster", budget=1 << 14, prefill_budget=1 << 14, prefill_dense_below=0, candidates=64)
    with hs.load(paths / "tiny-q8.hsr", threads=2, calibration=paths / "both.hsrcal") as model:
        def rows(profile) -> np.ndarray:
            with model.session(context=9100, beyond_trained=True, window_size=64, profile=profile, index="cluster") as s:
                s.append(ids)
                s.prefill()
                return np.concatenate([s.logits([i]) for i in IDS[:8]])

        assert np.array_equal(rows(everything), rows(0))
        assert not np.array_equal(rows(replace(everything, budget=64)), rows(0))


@pytest.mark.parametrize("selector", ["minmax", "mean", "classic", "random", "gaussian", "history", "oracle", "sketch", "cluster"])
@pytest.mark.parametrize("sink", [0, 64])
def test_lengths_around_the_borders_of_pages(paths, selector, sink):
    """Too short for a selection, one unit, one page more or less: never a number that is none, and dense if the budget is enough."""
    pages = {"window_size": 64, "rollback_tokens": 64}
    with hs.load(paths / "tiny-q8.hsr", threads=2, ram="64MiB", calibration=paths / "both.hsrcal") as model:
        for length in (1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 257):
            def rows(profile, sink, length=length):
                with model.session(profile=profile, sink_size=sink, **pages) as session:
                    return np.concatenate([session.logits(IDS[:length]), session.logits([7])])

            dense = rows(0, 64)
            for budget in (16, 64, 1 << 20):
                profile = Profile(selector=selector, budget=budget, block_size_fine=16, dense_below=0, prefill_budget=budget,
                                  prefill_dense_below=0)
                got = rows(profile, sink)
                assert np.isfinite(got).all()
                if budget == 1 << 20 and selector != "history":
                    assert np.array_equal(got, dense)


@pytest.mark.parametrize("selector", ["minmax", "history", "oracle", "sketch", "cluster"])
@pytest.mark.parametrize("context", [1, 40, 64, 65, 300])
def test_contexts_smaller_than_the_window(paths, selector, context):
    """Even smaller than a page: there is nothing to select, so all that can be appended is computed densely."""
    with hs.load(paths / "tiny-q8.hsr", threads=2, calibration=paths / "both.hsrcal") as model:
        def rows(profile) -> np.ndarray:
            with model.session(context=context, window_size=512, profile=profile) as session:
                got = session.logits(IDS[:context])
                with pytest.raises(hs.HisparseError, match="context"):
                    session.append([7])
                return got

        assert np.array_equal(rows(Profile(selector=selector, budget=16, prefill_budget=16, prefill_dense_below=0)), rows(0))


@pytest.mark.parametrize("selector", ["minmax", "mean", "classic", "random", "gaussian"])
def test_selectors_without_calibration(paths, selector):
    """Finite results that no batch changes, and a report of what was covered."""
    profile = Profile(selector=selector, budget=256, virtual_tokens=False, dense_below=LENGTH - 16)
    appends = [LENGTH - 16] + [1] * 16
    with hs.load(paths / "tiny-q8.hsr", threads=2) as model:
        want = run(model, appends, Rules(), profile, kv="bf16")
        dense = run(model, appends, Rules(), 0)
        assert np.isfinite(want).all()
        assert np.array_equal(want[: LENGTH - 16], dense[: LENGTH - 16])
        assert not np.array_equal(want[LENGTH - 16 :], dense[LENGTH - 16 :])
        with model.session(context=4096, window_size=64, profile=profile) as s:
            s.logits(IDS)
            stats = s.stats()
            assert stats.sparse_rows == 16
            assert np.isnan(stats.covered) if selector == "random" else 0 < stats.covered <= 1.0001
            assert stats.attended_tokens <= 64 + 64 + 256 + 64
    with hs.load(paths / "tiny-q8.hsr", threads=1) as model:
        assert np.array_equal(run(model, appends, Rules(), profile, kv="bf16"), want)


def test_auto_without_a_calibration(paths):
    """minmax over int8 pages, without virtual tokens; told once for each engine, and only where it is so."""
    lines: list[str] = []
    log = logging.Logger("test", logging.WARNING)
    log.addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(record.getMessage())
    cases = [("tiny-q8.hsr", None, {}, "int8", "minmax"), ("tiny-q8.hsr", None, {"profile": 0}, "bf16", "none"),
             ("tiny-q8.hsr", None, {"kv": "bf16"}, "bf16", "minmax"), ("tiny-q8.hsr", "both.hsrcal", {}, "bf16", "cluster"),
             ("tiny.hsr", None, {}, "f32", "minmax")]
    for name, calibration, options, kv, index in cases:
        lines.clear()
        with hs.load(paths / name, threads=1, calibration=calibration and paths / calibration, log=log) as model:
            with model.session(**{"profile": "balanced", **options}) as s, model.session(**{"profile": "fast", **options}) as other:
                assert (s.stats().kv_format, s.stats().index_kind) == (kv, index) and other.stats().kv_format == kv
                s.set_profile(0)
                with s.fork() as fork:
                    assert fork.stats().kv_format == kv, "formats are for life"
        dense = "profile" in options or calibration
        assert len(lines) == (0 if dense else 1) and all("selector auto is minmax without virtual tokens" in line for line in lines)
        assert all(("is int8" in line) == (name == "tiny-q8.hsr") for line in lines)


def test_auto_without_a_calibration_is_what_it_says(paths):
    few = Profile(budget=64, virtual_tokens=True)
    with hs.load(paths / "tiny-q8.hsr", threads=1, calibration=False) as model:
        got = run(model, [LENGTH - 20] + [1] * 20, Rules(), few)
        said = replace(few, selector="minmax", virtual_tokens=False)
        assert np.array_equal(got, run(model, [LENGTH - 20] + [1] * 20, Rules(), said, kv="int8"))


def test_requests_of_different_profiles_share_a_step(paths):
    profiles = [0, Profile(selector="oracle", budget=64, virtual_tokens=False), Profile(selector="minmax", budget=256), 0]
    with hs.load(paths / "tiny-q8.hsr", threads=2) as model:
        def generate(session):
            return session.generate(max_tokens=12, temperature=0.0, return_details=True).tokens

        alone = []
        for profile in profiles:
            with model.session(context=4096, window_size=64, profile=profile) as s:
                s.append(IDS[:1500])
                alone.append(list(generate(s)))
        import concurrent.futures

        sessions = [model.session(context=4096, window_size=64, profile=profile) for profile in profiles]
        for s in sessions:
            s.append(IDS[:1500])
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            together = [list(tokens) for tokens in pool.map(generate, sessions)]
        for s in sessions:
            s.close()
    assert together == alone


@pytest.mark.parametrize("changes, name", [
    ({"budget": 0}, "budget"), ({"slice_size": 48}, "slice_size"), ({"sparse_ratio": 1.5}, "sparse_ratio"),
    ({"selector": "sketch"}, "sketch"), ({"selector": "best"}, "best"), ({"block_size_coarse": 100}, "block_size_coarse"),
    ({"dense_layers": (5,)}, "dense_layers"), ({"layer_budgets": ((9, 64),)}, "layer"),
    ({"forced_history": -1}, "forced_history"), ({"forced_history": 65}, "forced_history"),
])
def test_bad_profiles_are_refused_by_name(paths, changes, name):
    with hs.load(paths / "tiny-q8.hsr", threads=1) as model, pytest.raises((hs.HisparseError, ValueError), match=name):
        model.session(profile=Profile(**changes))


@pytest.mark.slow
@pytest.mark.parametrize("sketch", [(8, 16), (32, 0)])
def test_sketches_of_other_sizes(tmp_path, sketch):
    """Keys vary in 16 of 32 components, which come first in the calibration: with 2 bits for half of them, or with 4 for all."""
    cfg = tiny.config(max_position_embeddings=4096, head_dim=32)
    weights = tiny.weights(cfg, 5)
    for layer in range(2):
        for name in ("q", "k"):
            weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"].reshape(-1, 4, 8, 64)[:, 1::2] = 0
    tiny.write_hf(tmp_path / "hf", cfg, weights)
    convert(tmp_path / "hf", tmp_path / "m.hsr", dtype="f32")
    write_identity(tmp_path / "m.hsr", tmp_path / "m.hsrcal", [1, 1])
    made = read_calibration(tmp_path / "m.hsrcal")
    order = np.argsort(np.arange(32) // 8 % 2, kind="stable")
    write_calibration(tmp_path / "m.hsrcal", replace(made, basis_k=made.basis_k[..., order], basis_q=made.basis_q[..., order]))
    rules, appends = Rules(budget=64, dense_below=LENGTH - 20), [LENGTH - 20] + [1] * 20
    want, without = (sparse_reference.logits(tmp_path / "hf", IDS, appends, replace(rules, virtual=of)) for of in ((True, True), ()))
    with hs.load(tmp_path / "m.hsr", threads=2) as model:
        got = run(model, appends, rules, profile_of(rules, selector="sketch", virtual_tokens=True), sketch=sketch)
    error, left_out = (np.abs(got - rows)[-20:].mean() for rows in (want, without))
    assert 2 * error < left_out


def test_unknown_profile_id_and_missing_index(paths):
    with hs.load(paths / "tiny-q8.hsr", threads=1) as model:
        with pytest.raises(hs.InvalidError, match="profile 77"):
            model.session(profile=77)
        with model.session() as s, pytest.raises(hs.UnsupportedError, match="index"):
            s.set_profile(Profile(selector="minmax"))


def test_rollback_and_rebuild_keep_the_bits(paths):
    rules, appends = RULES["decode"]
    with hs.load(paths / "tiny-q8.hsr", threads=2) as model:
        want = run(model, appends, rules)
        with model.session(context=4096, window_size=rules.window, sink_size=rules.sink, profile=profile_of(rules)) as s:
            s.logits(IDS[: appends[0]])
            for _ in range(2):
                for i in range(appends[0], LENGTH):
                    assert np.array_equal(s.logits(IDS[i : i + 1])[0], want[i])
                s.truncate(appends[0])


def test_time_is_told_by_what_it_went_to(paths):
    """Parts of the time of steps; what a session does not do takes none."""
    with hs.load(paths / "tiny.hsr", threads=1) as model:
        run(model, [LENGTH], RULES["decode"][0], profile="exact")
        dense = model.stats()
        run(model, [LENGTH], RULES["decode"][0])
        both = model.stats()
    assert dense.attend_ns > 0 and dense.seal_ns > 0 and dense.select_ns == dense.cluster_ns == 0
    assert both.attend_ns > dense.attend_ns and both.select_ns > 0
    assert both.attend_ns + both.select_ns + both.seal_ns < both.prefill_ns + both.decode_ns
