# SPDX-License-Identifier: Apache-2.0
"""Selector cluster beyond one segment of 8192 tokens: what it shares with sketch, and what never shows in its results."""

from __future__ import annotations

import hisparse_rt as hs
import numpy as np
import pytest
import tiny
from hisparse_rt.profile import Profile
from hisparse_rt.tools.calibrate import calibrate
from hisparse_rt.tools.convert import convert
from hisparse_rt.calibration import write_calibration

pytestmark = pytest.mark.slow  # of the front and the tools; what it runs in C the other tests run too

LENGTH = 18000
TAIL = 24
IDS = [int(i) for i in np.random.default_rng(8).integers(3, 300, LENGTH)]
OPTIONS = {"context": 20000, "window_size": 128, "sink_size": 64}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    cfg = tiny.config(max_position_embeddings=32768)
    tiny.write_hf(folder / "hf", cfg, tiny.weights(cfg, 5))
    convert(folder / "hf", folder / "tiny.hsr", dtype="q8")
    with hs.load(folder / "tiny.hsr", calibration=False, threads=2) as model:
        calibration, _ = calibrate(model, np.asarray(IDS[:2048], np.int32))
    write_calibration(folder / "tiny.hsrcal", calibration)
    return folder / "tiny.hsr"


def profile_of(selector: str, **changes) -> Profile:
    return Profile(**{"selector": selector, "budget": 256, "candidates": 400, "dense_below": 512, "prefill_budget": 512,
                      "prefill_dense_below": 1024, **changes})


def tail(session: hs.Session, n: int = LENGTH) -> np.ndarray:
    session.append(IDS[: n - TAIL])
    session.prefill()
    return np.concatenate([session.logits([i]) for i in IDS[n - TAIL : n]])


def run(path, selector: str, n: int = LENGTH, profile=None, index="auto", **load) -> np.ndarray:
    options = {"profile": profile or profile_of(selector), "index": index, **OPTIONS}
    with hs.load(path, **{"threads": 2, **load}) as model, model.session(**options) as session:
        return tail(session, n)


@pytest.fixture(scope="module")
def want(path):
    return run(path, "cluster")


def test_as_sketch_within_a_segment(path):
    assert np.array_equal(run(path, "cluster", 8192), run(path, "sketch", 8192))


def test_close_to_sketch_beyond(path, want):
    flat = run(path, "sketch")
    window = run(path, "sketch", profile=profile_of("sketch", budget=16, virtual_tokens=False, forced_history=0))
    assert not np.array_equal(want, flat)
    assert np.abs(want - flat).mean() < np.abs(window - flat).mean()


def test_by_itself_a_session_looks_at_clusters_first(path, want):
    with hs.load(path) as model, model.session(profile="balanced") as session:
        assert session.stats().index_kind == "cluster"
    assert np.array_equal(run(path, "auto"), want)


def test_candidates_follow_the_budget(path):
    def by(budget: int, candidates: int) -> np.ndarray:
        return run(path, "cluster", profile=profile_of("cluster", budget=budget, candidates=candidates, prefill_budget=0))

    assert np.array_equal(by(1536, 0), by(1536, 6144))
    assert not np.array_equal(by(1536, 0), by(1536, 4096))
    assert np.array_equal(by(64, 0), by(64, 4096))


def test_candidates_for_everything_are_sketch(path):
    wide = profile_of("cluster", candidates=1 << 20)
    flat = run(path, "sketch", 9000, index="cluster")
    assert np.array_equal(run(path, "cluster", 9000, profile=wide), flat)
    entries = run(path, "sketch", 9000)
    assert not np.array_equal(flat, entries), "beyond a segment the records are read, not the sketches of pages"
    window = run(path, "sketch", 9000, profile=profile_of("sketch", budget=16, virtual_tokens=False, forced_history=0))
    assert np.abs(flat - entries).mean() < 0.5 * np.abs(window - entries).mean()


@pytest.mark.parametrize("load", [{"threads": 1}, {"chunk": 192}, {"debug_async": True}, {"max_batch": 128}],
                         ids=lambda load: "-".join(load))
def test_bits_do_not_depend_on_how_it_is_computed(path, want, load):
    assert np.array_equal(run(path, "cluster", **load), want)


def test_forks_truncation_and_files(path, want, tmp_path):
    with hs.load(path, threads=2) as model:
        with model.session(profile=profile_of("cluster"), rollback_tokens=64, **OPTIONS) as session:
            assert np.array_equal(tail(session), want)
            slabs, strips, records = 3 * 16384, 1 * 16384, 2 * 94208
            assert session.stats().index_bytes == 2 * 2 * (slabs + strips + records)
            session.truncate(LENGTH - 10)
            with session.fork() as fork:
                again = np.concatenate([fork.logits([i]) for i in IDS[LENGTH - 10 :]])
            assert np.array_equal(again, want[-10:])
            session.save(tmp_path / "session.kv")
        with model.restore(tmp_path / "session.kv", profile=profile_of("cluster")) as session:
            again = np.concatenate([session.logits([i]) for i in IDS[LENGTH - 10 :]])
            assert np.array_equal(again, want[-10:])


@pytest.mark.parametrize("cut", [8960, 8320, 384])
def test_cut_into_a_segment_whose_sketches_are_gone(path, cut, tmp_path):
    """With a plain format a session may be cut anywhere: what is missing of the index is made again. Nothing is given up within the
    rollback distance."""
    profile = profile_of("cluster", forced_history=0)   # of which files hold nothing
    with hs.load(path, threads=2) as model:
        with model.session(profile=profile, kv="bf16", rollback_tokens=19000, **OPTIONS) as session:
            session.append(IDS[:LENGTH])
            session.prefill()
            all_of_it = session.stats().index_bytes
            session.truncate(cut)
            session.append(IDS[cut:12000])
            expected = session.logits([5])
        with model.session(profile=profile, kv="bf16", **OPTIONS) as session:
            session.append(IDS[:LENGTH])
            session.prefill()
            assert session.stats().index_bytes == all_of_it - 4 * 8 * 16384, "the strips of two segments"
            session.truncate(cut)
            session.save(tmp_path / "cut.kv")
            with session.fork() as fork:
                for s in (fork, session):
                    s.append(IDS[cut:12000])
                    assert np.array_equal(s.logits([5]), expected)
        with model.restore(tmp_path / "cut.kv", profile=profile) as session:
            session.append(IDS[cut:12000])
            assert np.array_equal(session.logits([5]), expected)


@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_pages_that_leave_memory_change_nothing(path, kv, tmp_path):
    def run_in(**load) -> np.ndarray:
        with hs.load(path, threads=2, **load) as model, model.session(profile=profile_of("cluster"), kv=kv, **OPTIONS) as session:
            result = tail(session)
            if "cold" in load:
                assert model.stats().cold_misses > 0
            return result

    assert np.array_equal(run_in(cold=str(tmp_path), cold_size="64MiB", ram={"bf16": "9MiB", "int8": "7MiB"}[kv]), run_in())


def test_exactly_what_is_planned(path):
    """Strips come and go: what they take at most is admitted, and enough to compute with."""
    options = {"profile": profile_of("cluster"), "kv": "bf16", **OPTIONS, "context": LENGTH}
    found = hs.plan(path, ram="1GiB", **options)
    assert found.fits and found.memory_bytes == found.session_blocks << 20
    for blocks, fits in ((found.session_blocks, True), (found.session_blocks - 1, False)):
        with hs.load(path, threads=2, ram=blocks << 20) as model, model.session(**options) as session:
            if fits:
                session.append(IDS)
                session.prefill()
                assert session.stats().index_bytes <= found.index_bytes
            else:
                with pytest.raises(hs.NoSpaceError):
                    session.append(IDS)
