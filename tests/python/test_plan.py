# SPDX-License-Identifier: Apache-2.0
"""Planning agrees with admission to the block, for every format, index and number of sessions, with a cold tier and without."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import hisparse_rt as hs
import numpy as np
import pytest
import tiny
from hisparse_rt.calibration import Calibration, write_calibration
from hisparse_rt.profile import Profile
from hisparse_rt.tools.convert import convert
from hisparse_rt.tools.model_sizes import sizes
from shell import fails, run

pytestmark = pytest.mark.slow  # of the front and the tools; what it runs in C the other tests run too

MIB = 1 << 20
IDS = [int(i) for i in np.random.default_rng(3).integers(3, 300, 4000)]
MINMAX = Profile(selector="minmax", budget=128, virtual_tokens=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Heads of 64 in four layers: sessions of a few thousand tokens take several blocks."""
    folder = tmp_path_factory.mktemp("plan")
    cfg = tiny.config(max_position_embeddings=8192, eos_token_id=tiny.NULL, num_hidden_layers=4, head_dim=64)
    tiny.write_hf(folder / "hf", cfg, tiny.weights(cfg, 7))
    for dtype in ("f32", "bf16", "q8", "q4"):
        convert(folder / "hf", folder / f"{dtype}.hsr", dtype=dtype)
    return folder


def append_all(path: Path, n: int, context: int, session: dict, **engine) -> None:
    """Admit n full sessions; what cannot be admitted raises. With a cold tier they are computed, too."""
    with hs.load(path, threads=2, calibration=False, **engine) as model:
        open_sessions = [model.session(context=context, **session) for _ in range(n)]
        for s in open_sessions:
            s.append(IDS[:context])
        if "cold" in engine:
            for s in open_sessions:
                s.prefill()
        stats = model.stats()
        assert stats.hot_blocks_used + stats.hot_blocks_reserved <= stats.hot_blocks_total


CASES = {
    "bf16": ({"kv": "bf16"}, 1), "f32": ({"kv": "f32"}, 1), "two": ({"kv": "bf16"}, 2),
    "five": ({"kv": "int8"}, 5), "int8": ({"kv": "int8"}, 1),
    "window": ({"kv": "int8", "window_size": 64, "sink_size": 0, "rollback_tokens": 0}, 3),
    "minmax": ({"kv": "bf16", "profile": MINMAX}, 2),
    "int8-minmax": ({"kv": "int8", "profile": MINMAX, "window_size": 128}, 2),
}


@pytest.mark.parametrize("context", [1, 64, 1000, 4000])
@pytest.mark.parametrize("name", CASES)
def test_exactly_what_is_planned(folder, name, context):
    session, n = CASES[name]
    found = hs.plan(folder / "q8.hsr", context=context, sessions=n, calibrated=False, ram="1GiB", **session)
    assert found.fits and found.memory_bytes == n * found.session_blocks * MIB and found.n_resident == n
    blocks = found.memory_bytes // MIB
    append_all(folder / "q8.hsr", n, context, session, ram=blocks * MIB)
    assert hs.plan(folder / "q8.hsr", context=context, sessions=n, calibrated=False, ram=blocks * MIB, **session).fits
    if blocks == 1:
        return
    short = hs.plan(folder / "q8.hsr", context=context, sessions=n, calibrated=False, ram=(blocks - 1) * MIB, **session)
    assert not short.fits and short.short_of == "memory"
    assert (short.short_needed, short.short_available) == (blocks * MIB, (blocks - 1) * MIB)
    with pytest.raises(hs.NoSpaceError):
        append_all(folder / "q8.hsr", n, context, session, ram=(blocks - 1) * MIB)


def test_auto_as_sessions_have_it(folder):
    """Without a calibration a sparse session has int8 pages by itself."""
    cases = (("q8.hsr", MINMAX, "int8"), ("q8.hsr", "balanced", "int8"), ("q8.hsr", 0, "bf16"), ("f32.hsr", MINMAX, "f32"))
    for name, profile, kv in cases:
        found = hs.plan(folder / name, context=4000, calibrated=False, ram="1GiB", profile=profile)
        with hs.load(folder / name, threads=1, calibration=False, ram="64MiB") as model, model.session(context=4000, profile=profile) as s:
            s.append(IDS)
            assert found.kv_format == kv == s.stats().kv_format
            assert model.stats().hot_blocks_reserved + model.stats().hot_blocks_used == found.session_blocks
    assert hs.plan(folder / "q8.hsr", context=4000, calibrated=True, ram="1GiB", profile="balanced").kv_format == "bf16"


def least(fits, low: int, high: int) -> int:
    """The least number of MiB in (low, high] that fits."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle * MIB) else (middle, high)
    return high


@pytest.mark.parametrize("session, n", [({"kv": "bf16"}, 1), ({"kv": "int8"}, 2), ({"kv": "bf16", "profile": MINMAX}, 2)],
                         ids=["bf16", "two", "minmax"])
def test_exactly_what_is_planned_with_a_cold_tier(folder, tmp_path, session, n):
    options = {"context": 4000, "sessions": n, "calibrated": False, "chunk": 64, "cold": str(tmp_path), "window_size": 64,
               "rollback_tokens": 64, **session}
    session = {**session, "window_size": 64, "rollback_tokens": 64}
    ram = least(lambda size: hs.plan(folder / "q8.hsr", ram=size, cold_size="1GiB", **options).fits, 0, 200)
    cold = least(lambda size: hs.plan(folder / "q8.hsr", ram=ram * MIB, cold_size=size, **options).fits, 0, 200)
    found = hs.plan(folder / "q8.hsr", ram=ram * MIB, cold_size=cold * MIB, **options)
    assert found.fits and found.n_resident < n and found.memory_bytes == ram * MIB and 0 < found.cold_bytes == cold * MIB
    engine = {"chunk": 64, "cold": str(tmp_path)}
    append_all(folder / "q8.hsr", n, 4000, session, ram=ram * MIB, cold_size=cold * MIB, **engine)
    for short_ram, short_cold, what in ((ram - 1, cold, "memory"), (ram, cold - 1, "cold storage")):
        short = hs.plan(folder / "q8.hsr", ram=short_ram * MIB, cold_size=short_cold * MIB, **options)
        assert not short.fits and short.short_of == what
        with pytest.raises(hs.NoSpaceError):
            append_all(folder / "q8.hsr", n, 4000, session, ram=short_ram * MIB, cold_size=short_cold * MIB, **engine)


def test_memory_for_one_resident_session_is_enough_for_three(folder, tmp_path):
    """The first one fits whole; for the others to come in, it must be ready to leave."""
    session = {"kv": "int8", "window_size": 64, "rollback_tokens": 64}
    options = {"context": 8000, "calibrated": False, "chunk": 64, "cold": str(tmp_path), "cold_size": "1GiB", **session}
    one = hs.plan(folder / "q8.hsr", ram="1GiB", **options).memory_bytes
    assert hs.plan(folder / "q8.hsr", ram=one, **options).n_resident == 1
    three = hs.plan(folder / "q8.hsr", ram=one, sessions=3, **options)
    assert three.fits and three.n_resident == 0 and three.memory_bytes <= one
    append_all(folder / "q8.hsr", 3, 8000, session, ram=one, chunk=64, cold=str(tmp_path), cold_size="1GiB")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("session", [{"kv": "int8"}, {"kv": "bf16", "profile": MINMAX}], ids=["int8", "minmax"])
def test_sessions_that_fit_grow_in_any_order(folder, tmp_path, session, seed):
    """With not a block more than planned, piece by piece, and decode together in the end."""
    session = {**session, "window_size": 64, "rollback_tokens": 64}
    options = {"context": 4000, "sessions": 5, "calibrated": False, "chunk": 64, "cold": str(tmp_path), **session}
    ram = least(lambda size: hs.plan(folder / "q8.hsr", ram=size, cold_size="1GiB", **options).fits, 0, 400)
    rng = np.random.default_rng(seed)
    with hs.load(folder / "q8.hsr", threads=2, calibration=False, chunk=64, ram=ram * MIB, cold=tmp_path, cold_size="1GiB") as model:
        sessions = [model.session(context=4000, **session) for _ in range(5)]
        left = {s: 3990 - 300 for s in sessions}
        for s in sessions:
            s.append(IDS[:300])
            s.prefill()
        while left:
            s = list(left)[rng.integers(len(left))]
            n = min(left[s], int(rng.integers(1, 1500)))
            s.fill(n)
            left[s] -= n
            if not left[s]:
                del left[s]
        streams = [s.generate(stream=True, max_tokens=4, ignore_eos=True) for s in sessions]
        for stream in streams:
            for _ in stream:
                pass
            assert len(stream.tokens) == 4
        stats = model.stats()
        assert stats.hot_blocks_total == ram and stats.cold_evictions > 0 and stats.n_sessions == 5


def test_resident_as_long_as_memory_holds_them(folder, tmp_path):
    options = {"context": 8000, "chunk": 64, "window_size": 64, "rollback_tokens": 64, "cold": str(tmp_path), "cold_size": "1GiB"}
    one = hs.plan(folder / "q8.hsr", ram="1GiB", **options)
    assert one.fits and one.n_resident == 1 and one.cold_bytes == 0
    found = hs.plan(folder / "q8.hsr", sessions=7, ram=6 * one.memory_bytes, **options)
    assert found.fits and 0 < found.n_resident < 7 and 0 < found.cold_bytes < 7 * one.memory_bytes
    assert found.memory_bytes <= found.memory_budget <= found.total_bytes


def test_memory_that_is_not_read_in_place_holds_nothing_that_is_promised(folder, tmp_path):
    options = {"context": 8000, "chunk": 64, "window_size": 64, "rollback_tokens": 64, "cold": str(tmp_path),
               "cold_size": "1GiB", "hot": "16MiB"}
    alone, beside = (hs.plan(folder / "q8.hsr", warm=warm, readable_tiers="hot", **options) for warm in (None, "8MiB"))
    together = hs.plan(folder / "q8.hsr", warm="8MiB", **options)
    assert alone.memory_budget == beside.memory_budget == 16 * MIB and together.memory_budget == 24 * MIB
    assert beside.total_bytes == alone.total_bytes + 8 * MIB


def test_a_history_of_attention_is_counted(folder):
    options = {"context": 4000, "sessions": 3, "ram": "1GiB", "calibrated": False}
    plain, *kept = (hs.plan(folder / "q8.hsr", profile=profile, **options) for profile in (
        MINMAX, replace(MINMAX, forced_history=4), replace(MINMAX, selector="history"), {"selector": "history", "mode": "dense"}))
    assert plain.history_bytes == kept[2].history_bytes == 0
    info = hs.load(folder / "q8.hsr", threads=1, calibration=False).info
    for found in kept[:2]:
        assert found.history_bytes == 8 * info.n_layers * info.n_kv_heads * 64   # 63 pages, in runs of 64
        assert found.memory_bytes <= plain.memory_bytes, "it is beside the budget"
    assert kept[0].total_bytes == plain.total_bytes + 3 * kept[0].history_bytes


@pytest.mark.parametrize("selector", ["cluster", "sketch", "minmax", "gaussian"])
def test_an_index_is_small(folder, selector):
    """At most 8 % of plain pages at 32K tokens, by the plan and in a session that has so many."""
    n, profile = 32768, Profile(selector=selector, budget=1024)
    plain = n * 4 * 2 * 2 * 64 * 2   # layers, kv heads, keys and values
    options = {"context": n, "beyond_trained": True, "profile": profile, "kv": "bf16"}
    found = hs.plan(folder / "q8.hsr", calibrated=True, ram="1GiB", **options)
    assert 0.01 * plain < found.index_bytes <= 0.08 * plain
    with hs.load(folder / "q8.hsr", threads=2, ram="512MiB", calibration=identity(folder)) as model, model.session(**options) as s:
        s.append(IDS[:64])
        s.prefill()
        s.fill(n - 64)
        assert s.stats().n_tokens == n and 0.9 * found.index_bytes < s.stats().index_bytes <= found.index_bytes


def identity(folder: Path) -> Path:
    """A calibration that changes no key."""
    with hs.load(folder / "q8.hsr", calibration=False, threads=1) as loaded:
        source, shape = loaded.metadata("hisparse.source"), (4, 2, 64)
    basis, mean = np.broadcast_to(np.eye(64, dtype=np.float32), (*shape, 64)), np.zeros(shape, np.float32)
    made = Calibration(source or "", basis, basis, mean, mean, np.ones(4, bool), np.zeros(4, np.float32))
    write_calibration(folder / "identity.hsrcal", made)
    return folder / "identity.hsrcal"


def test_too_many_sessions(folder):
    found = hs.plan(folder / "q8.hsr", context=10, sessions=5, max_sessions=4, ram="1GiB")
    assert (found.fits, found.short_of, found.short_needed, found.short_available) == (False, "sessions", 5, 4)


def test_a_restored_session_needs_no_more(folder, tmp_path):
    for kv in ("bf16", "int8"):
        found = hs.plan(folder / "q8.hsr", context=4000, kv=kv, ram="1GiB")
        with hs.load(folder / "q8.hsr", threads=2, ram="64MiB", calibration=False) as model, model.session(context=4000, kv=kv) as s:
            s.append(IDS)
            s.save(tmp_path / "s")
        with hs.load(folder / "q8.hsr", threads=1, ram=found.memory_bytes, calibration=False) as model:
            model.restore(tmp_path / "s").close()
        with hs.load(folder / "q8.hsr", threads=1, ram=found.memory_bytes - MIB, calibration=False) as model:
            with pytest.raises(hs.NoSpaceError):
                model.restore(tmp_path / "s")


# ---- models that are not converted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8", "q4"])
def test_weights_are_estimated_from_shapes(folder, tmp_path, dtype):
    """To the byte for a model without biases, but for its rotary table."""
    want = hs.plan(folder / f"{dtype}.hsr", context=1000)
    shutil.copy(folder / "hf" / "config.json", tmp_path / "config.json")
    for source in (folder / "hf", tmp_path, tmp_path / "config.json"):
        found = hs.plan(source, context=1000, dtype=dtype)
        assert abs(found.weight_bytes - want.weight_bytes) <= 4 * 64
        assert found.session_blocks == want.session_blocks and found.kv_format == want.kv_format
        assert found.scratch_bytes == want.scratch_bytes


def test_a_gguf_file(tmp_path):
    cfg = tiny.config()
    tiny.write_gguf(tmp_path / "m.gguf", cfg, tiny.weights(cfg))
    convert(tmp_path / "m.gguf", tmp_path / "m.hsr", "bf16")
    found, want = hs.plan(tmp_path / "m.gguf", context=200, dtype="bf16"), hs.plan(tmp_path / "m.hsr", context=200)
    assert abs(found.weight_bytes - want.weight_bytes) <= 4 * 64 and found.session_blocks == want.session_blocks


def test_sizes_of_known_models(tmp_path):
    """SmolLM2-135M has 134.5 million parameters."""
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 100000}))
    found = sizes(str(tmp_path), "bf16")
    assert found["n_params"] == 134_515_008 and found["head_dim"] == 64


# ---- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, error, text", [
    ({"context": 9000}, hs.ContextError, "beyond_trained"), ({"context": 0}, hs.InvalidError, "context"),
    ({"sessions": 0}, hs.InvalidError, "sessions"), ({"sessions": 65537}, hs.InvalidError, "sessions"),
    ({"cold": "/tmp", "cold_size": "17TiB"}, hs.InvalidError, "cold_bytes is 18691697672192, at most 16 TiB"),
    ({"kv": "int4"}, hs.InvalidError, "kv"), ({"window_size": 100}, hs.InvalidError, "window_size"),
    ({"ram": "1KiB"}, hs.InvalidError, "budget"),
    ({"dtype": "q8"}, hs.InvalidError, "dtype"), ({"profile": "none such"}, hs.InvalidError, "profile"),
    ({"chunk": 5000}, hs.InvalidError, "chunk"),
    ({"cold": "/none/such", "context": 10}, hs.FileError, "cold_dir"), ({"tempo": 3}, TypeError, "tempo"),
])
def test_wrong_options(folder, options, error, text):
    with pytest.raises(error, match=text):
        hs.plan(folder / "q8.hsr", **options)


def test_calibrations_that_are_none(folder, tmp_path):
    fails("plan", folder / "q8.hsr", "--calibration", tmp_path / "none", text="none: no such file")
    shutil.copy(folder / "q8.hsr", tmp_path / "m.hsr")
    (tmp_path / "m.hsrcal").touch()
    asked = ("plan", tmp_path / "m.hsr", "--profile", "balanced", "--context", "200K", "--beyond-trained", "--json")
    choices = ((), ("--no-calibrate",), ("--calibration", tmp_path / "m.hsrcal"))
    index = [json.loads(run(*asked, *options).stdout)["index_bytes"] for options in choices]
    assert index[0] == index[2] != index[1], "without a calibration selector auto is minmax"


def test_wrong_sources(folder, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    for source, error in ((tmp_path, hs.FormatError), (tmp_path / "config.json", hs.FormatError), (tmp_path / "none.hsr", hs.FileError),
                          (tmp_path / "none.json", (hs.FormatError, hs.FileError)), ("", hs.InvalidError)):
        with pytest.raises(error):
            hs.plan(source)


# ---- the command ----------------------------------------------------------------------------------------------------------


def test_command(folder, tmp_path):
    done = run("plan", folder / "q8.hsr", "--context", "4000", "--sessions", "2", "--kv", "int8", "--ram", "1GiB")
    assert done.returncode == 0 and "2 sessions of 4,000 tokens" in done.stdout
    assert done.stdout.rstrip().endswith("fits, all of it in memory")
    done = run("plan", "--config", folder / "hf" / "config.json", "--dtype", "q4", "--context", "1000000", "--beyond-trained",
               "--kv", "compact", "--ram", "64MiB", "--cold", tmp_path, "--cold-size", "2GiB", "--json")
    facts = json.loads(done.stdout)
    assert facts["fits"] and facts["context"] == 1_000_000 and facts["cold_bytes"] > 0 and facts["kv_format"] == "compact"
    budget = ("--hot", "16MiB", "--warm", "8MiB", "--json")
    for tiers, memory in (("all", 24), ("hot", 16)):
        done = run("plan", folder / "q8.hsr", "--context", "4K", *budget, "--readable-tiers", tiers, "--cold", folder)
        assert json.loads(done.stdout)["memory_budget"] == memory * MIB
    (tmp_path / "p.json").write_text('{"forced_history": 4}')
    assert "history of attention" in run("plan", folder / "q8.hsr", "--context", "4000", "--profile", tmp_path / "p.json").stdout
    done = run("plan", folder / "q8.hsr", "--context", "4000", "--kv", "f32", "--ram", "1MiB")
    assert done.returncode == 1 and "does not fit: short of memory" in done.stdout
    assert "--config" in fails("plan", code=2)
    assert "--config" in fails("plan", folder / "q8.hsr", "--config", folder / "hf" / "config.json", code=2)
    fails("plan", folder / "q8.hsr", "--context", "9000", text="beyond_trained")
