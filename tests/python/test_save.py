# SPDX-License-Identifier: Apache-2.0
"""Saved sessions: a restored one goes on to the bit and computes nothing again; whatever does not fit or is damaged is named; whatever
goes wrong while saving leaves the old file and nothing else."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import stat
import struct
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import hisparse_rt as hs
import numpy as np
import pytest
import tiny
from hisparse_rt.calibration import Calibration, write_calibration
from hisparse_rt.profile import Profile
from hisparse_rt.tools.convert import convert

LENGTH = 1600
IDS = [int(i) for i in np.random.default_rng(11).integers(3, 300, 4000)]
SMALL = {"window_size": 64, "sink_size": 64, "rollback_tokens": 64}
MINMAX = Profile(selector="minmax", budget=128, virtual_tokens=False)
SKETCH = Profile(selector="sketch", budget=128)


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("save")
    cfg = tiny.config(max_position_embeddings=4096, eos_token_id=tiny.NULL)
    tiny.write_hf(folder / "hf", cfg, tiny.weights(cfg, 5))
    convert(folder / "hf", folder / "tiny.hsr", dtype="q8")
    convert(folder / "hf", folder / "tiny-f32.hsr", dtype="f32")
    tiny.write_hf(folder / "other", cfg, tiny.weights(cfg, 6))
    convert(folder / "other", folder / "other.hsr", dtype="q8")
    cfg = tiny.config(max_position_embeddings=4096, eos_token_id=tiny.NULL, num_hidden_layers=4, head_dim=64)
    tiny.write_hf(folder / "wide", cfg, tiny.weights(cfg, 7))
    convert(folder / "wide", folder / "wide.hsr", dtype="q8")
    cfg = tiny.config(max_position_embeddings=4096, num_hidden_layers=3)
    tiny.write_hf(folder / "deeper", cfg, tiny.weights(cfg, 5))
    convert(folder / "deeper", folder / "deeper.hsr", dtype="q8")
    return folder


def calibrate(model: Path, to: Path, seed: int) -> Path:
    """Random orthogonal bases: what matters here is only that pages depend on them."""
    with hs.load(model, threads=1, calibration=False) as m:
        info, mark = m.info, m.metadata("hisparse.source")
    d, shape = info.head_dim, (info.n_layers, info.n_kv_heads)
    random = np.random.default_rng(seed)
    basis = np.linalg.qr(random.standard_normal((*shape, d, d)))[0].astype(np.float32)
    means = random.standard_normal((2, *shape, d)).astype(np.float32) * 0.1
    made = Calibration(mark or "", basis, basis.copy(), means[0], means[1], virtual=np.ones(info.n_layers, bool),
                       gap=np.zeros(info.n_layers, np.float32))
    write_calibration(to, made)
    return to


@pytest.fixture(scope="module")
def calibrated(paths) -> Path:
    return calibrate(paths / "tiny.hsr", paths / "tiny.hsrcal", 1)


@pytest.fixture(scope="module")
def model(paths, calibrated):
    with hs.load(paths / "tiny.hsr", ram="256MiB", threads=2, calibration=calibrated) as model:
        yield model


def go_on(session: hs.Session, n: int = 12) -> list[int]:
    return list(session.generate(max_tokens=n, return_details=True).tokens)


def counted(model: hs.Model) -> tuple[int, ...]:
    stats = model.stats()
    return stats.n_sessions, stats.hot_blocks_used, stats.hot_blocks_reserved, stats.pages_sealed


def session_or_skip(model: hs.Model, kv: str, **options) -> hs.Session:
    try:
        return model.session(context=4096, kv=kv, **SMALL, **options)
    except hs.UnsupportedError as error:
        pytest.skip(f"kv {kv}: {error}")


# ---- the same bits --------------------------------------------------------------------------------------------------

KINDS = {
    "f32": ("f32", {}), "bf16": ("bf16", {}), "int8": ("int8", {}), "compact": ("compact", {}), "vtq": ("vtq", {}),
    "bf16-minmax": ("bf16", {"profile": MINMAX}), "int8-minmax": ("int8", {"profile": MINMAX}),
    "bf16-sketch": ("bf16", {"profile": SKETCH}), "compact-sketch": ("compact", {"profile": SKETCH}),
}


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200, LENGTH], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_goes_on_to_the_bit_and_computes_nothing_again(model, tmp_path, kind, length):
    kv, options = KINDS[kind]
    with session_or_skip(model, kv, **options) as s:
        s.logits(IDS[:length])
        s.save(tmp_path / "s")
        want = s.logits(IDS[length : length + 140])
        assert length < LENGTH or s.stats().pages_sealed > 0
    with model.restore(tmp_path / "s", profile=options.get("profile", 0)) as r:
        assert r.tokens == IDS[:length]
        before = model.stats().prefill_tokens
        got = r.logits(IDS[length : length + 140])
        assert model.stats().prefill_tokens - before == 140
        assert np.array_equal(got, want)


def test_clusters_come_along(model, tmp_path):
    """Of whole segments of 8192 tokens; a session that was only restored is saved with the same bytes."""
    profile, ids = Profile(selector="cluster", budget=128, dense_below=0), IDS * 3
    with model.session(context=12000, beyond_trained=True, kv="bf16", profile=profile, **SMALL) as s:
        s.append(ids[:9000])
        s.save(tmp_path / "s")
        want = s.logits(ids[9000:9070])
        kind = s.stats().index_kind
    with model.restore(tmp_path / "s", profile=profile) as r:
        assert r.stats().index_kind == kind
        r.save(tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == (tmp_path / "s").read_bytes()
        assert np.array_equal(r.logits(ids[9000:9070]), want)


@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_first_token_of_a_request(model, tmp_path, kv):
    """After a request, too: its last token is held and not computed."""
    with session_or_skip(model, kv) as s:
        s.append(IDS[:LENGTH])
        go_on(s)
        s.save(tmp_path / "s")
        want = go_on(s)
        tokens = s.tokens
    before = model.stats().prefill_tokens
    with model.restore(tmp_path / "s") as r:
        assert go_on(r) == want
        assert r.tokens == tokens
    assert model.stats().prefill_tokens - before <= 1


@pytest.mark.parametrize("options", [{"threads": 1}, {"chunk": 16}, {"chunk": 1024}, {"debug_async": True}, {"max_batch": 64}],
                         ids=lambda options: "-".join(options))
@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_in_another_engine(paths, calibrated, model, tmp_path, kv, options):
    with session_or_skip(model, kv) as s:
        s.append(IDS[:LENGTH])
        s.save(tmp_path / "s")
        want = go_on(s, 150)
    with hs.load(paths / "tiny.hsr", **{"ram": "64MiB", "threads": 2, "calibration": calibrated, **options}) as other:
        with other.restore(tmp_path / "s") as r:
            assert go_on(r, 150) == want
        assert counted(other) == (0, 0, 0, 0)


@pytest.mark.parametrize("kv", ["bf16", "int8"])
@pytest.mark.parametrize("back", [1, 40, 64])
def test_after_a_truncate(model, tmp_path, kv, back):
    """Also to the end of a page, where one more is sealed than so many tokens would have."""
    with session_or_skip(model, kv) as s:
        s.logits(IDS[:LENGTH])
        s.truncate(LENGTH - back)
        s.save(tmp_path / "s")
        want = s.logits(IDS[2000:2050])
    with model.restore(tmp_path / "s") as r:
        assert np.array_equal(r.logits(IDS[2000:2050]), want)
        r.truncate(LENGTH - back)
        assert np.array_equal(r.logits(IDS[2000:2050]), want)


@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_forks_are_saved_each_with_its_own(model, tmp_path, kv):
    before = counted(model)
    with session_or_skip(model, kv) as s:
        s.logits(IDS[:LENGTH])
        f = s.fork()
        f.logits(IDS[2000:2100])
        s.save(tmp_path / "s")
        f.save(tmp_path / "f")
        want = [s.logits(IDS[3000:3100]), f.logits(IDS[3000:3100])]
        f.close()
    for name, rows in zip("sf", want, strict=True):
        with model.restore(tmp_path / name) as r, r.fork() as again:
            assert np.array_equal(r.logits(IDS[3000:3100]), rows)
            assert np.array_equal(again.logits(IDS[3000:3100]), rows)
    assert counted(model) == before


def test_twice_saved_is_the_same_file_and_holds_nothing_of_others(paths, calibrated, model, tmp_path):
    """Slots are reused: what a file holds must not depend on who had them before."""
    for kv, profile in (("bf16", MINMAX), ("int8", MINMAX), ("compact", SKETCH)):
        with session_or_skip(model, kv, profile=profile) as s:
            s.append(IDS[:LENGTH - 7])
            s.save(tmp_path / "a")
        with hs.load(paths / "tiny.hsr", ram="64MiB", threads=2, calibration=calibrated) as other:
            with other.session(context=4096, kv="f32", **SMALL) as dirt:
                dirt.logits(IDS[1000:3500])
            with other.session(context=4096, kv=kv, profile=profile, **SMALL) as s:
                s.append(IDS[:LENGTH - 7])
                s.save(tmp_path / "b")
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes(), kv


def test_empty_session_and_rebuild(model, tmp_path):
    with model.session(context=100) as s:
        s.save(tmp_path / "empty")
    with model.restore(tmp_path / "empty") as r:
        assert r.tokens == [] and r.stats().context == 100
        r.append(IDS[:50])
        want = go_on(r)
        r.truncate(50)
        r.save(tmp_path / "s")
    with model.restore(tmp_path / "s") as r:
        r.rebuild()
        assert go_on(r) == want


def test_appended_tokens_are_computed_first(model, tmp_path):
    with model.session(context=4096) as s:
        s.append(IDS[:300])
        s.save(tmp_path / "s")
        assert s.stats().n_computed == 300


# ---- what may differ, and what not ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory) -> Path:
    """200 tokens."""
    path = tmp_path_factory.mktemp("saved") / "s"
    with model.session(context=1000, kv="bf16", **SMALL) as s:
        s.append(IDS[:200])
        s.save(path)
    return path


def test_context_may_change(model, saved):
    want = None
    for context in (None, 205, 1000, 4096):
        with model.restore(saved, context=context) as r:
            assert r.stats().context == (context or 1000)
            got = r.logits(IDS[200:205])
            want = got if want is None else want
            assert np.array_equal(got, want)
    before = counted(model)
    with pytest.raises(hs.ContextError, match="200 tokens do not fit a context of 199"):
        model.restore(saved, context=199)
    with pytest.raises(hs.ContextError, match="beyond_trained"):
        model.restore(saved, context=5000)
    model.restore(saved, context=5000, beyond_trained=True).close()
    assert counted(model) == before


def test_context_that_changes_the_rotation_is_refused(tmp_path):
    cfg = tiny.config(max_position_embeddings=1024, rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    tiny.write_hf(tmp_path / "hf", cfg, tiny.weights(cfg, 5))
    convert(tmp_path / "hf", tmp_path / "m.hsr", dtype="q8")
    with hs.load(tmp_path / "m.hsr", ram="64MiB", threads=1) as model:
        for context, others, bad in ((512, (300, 1024), (2048,)), (2048, (2048,), (1024, 2049, 3000))):
            with model.session(context=context, beyond_trained=True) as s:
                s.append(IDS[:200])
                s.save(tmp_path / "s")
                want = s.logits(IDS[200:210])
            for other in others:
                with model.restore(tmp_path / "s", context=other, beyond_trained=True) as r:
                    assert np.array_equal(r.logits(IDS[200:210]), want)
            for other in bad:
                with pytest.raises(hs.UnsupportedError, match="context"):
                    model.restore(tmp_path / "s", context=other, beyond_trained=True)


def test_kv_format_is_the_file_s(model, saved):
    model.restore(saved, kv="bf16").close()
    with pytest.raises(hs.InvalidError, match="kv_format is f32, the session was saved with bf16"):
        model.restore(saved, kv="f32")


@pytest.mark.parametrize("name, field", [("other.hsr", "source|weights"), ("deeper.hsr", "layers"), ("tiny-f32.hsr", "dtype")])
def test_another_model_is_named(paths, saved, name, field):
    with hs.load(paths / name, ram="32MiB", threads=1) as other:
        with pytest.raises(hs.FormatError, match=f"another model.*({field})"):
            other.restore(saved)
        assert counted(other) == (0, 0, 0, 0)


def test_calibration_counts_where_pages_depend_on_it(paths, model, saved, tmp_path):
    other = calibrate(paths / "tiny.hsr", tmp_path / "other.hsrcal", 2)
    with session_or_skip(model, "compact") as s:
        s.append(IDS[:400])
        s.save(tmp_path / "s")
    with hs.load(paths / "tiny.hsr", ram="32MiB", threads=1, calibration=other) as m:
        m.restore(saved).close()
        with pytest.raises(hs.FormatError, match="calibration"):
            m.restore(tmp_path / "s")
    with hs.load(paths / "tiny.hsr", ram="32MiB", threads=1, calibration=False) as m:
        m.restore(saved).close()
        with pytest.raises(hs.UnsupportedError, match="calibration"):
            m.restore(tmp_path / "s")


def test_profile_that_the_index_cannot_serve(model, saved):
    with pytest.raises(hs.UnsupportedError, match="index"):
        model.restore(saved, profile=MINMAX)


@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_a_budget_that_is_too_small_refuses_and_changes_nothing(paths, tmp_path, kv):
    with hs.load(paths / "wide.hsr", ram="64MiB", threads=2) as model, session_or_skip(model, kv) as s:
        s.append(IDS[:LENGTH])
        s.save(tmp_path / "s")
    blocks = hs.plan(paths / "wide.hsr", context=LENGTH, kv=kv, ram="1GiB", **SMALL).session_blocks
    for n, fits in ((blocks - 1, False), (blocks, True)):
        with hs.load(paths / "wide.hsr", ram=n << 20, threads=1) as other:
            if fits:
                other.restore(tmp_path / "s").close()
            else:
                with pytest.raises(hs.NoSpaceError, match="KV blocks"):
                    other.restore(tmp_path / "s")
            assert counted(other) == (0, 0, 0, 0)
    with hs.load(paths / "wide.hsr", ram="64MiB", threads=1, max_sessions=1) as other, other.session():
        with pytest.raises(hs.NoSpaceError, match="max_sessions"):
            other.restore(tmp_path / "s")


# ---- damaged files --------------------------------------------------------------------------------------------------


def test_damage_anywhere_is_found(model, tmp_path):
    """A byte of every 4 KiB, and the first and last bytes of everything."""
    with model.session(context=4096, kv="bf16", profile=MINMAX, **SMALL) as s:
        s.append(IDS[:500])
        s.save(tmp_path / "s")
    whole = (tmp_path / "s").read_bytes()
    meaning = [i for i in range(0, len(whole), 4096)] + [i + 4095 for i in range(4096 * 3, len(whole), 4096)]
    before, seen = counted(model), set()
    with open(tmp_path / "s", "r+b") as file:
        for at in meaning[:: max(len(meaning) // 150, 1)] + meaning[:4] + meaning[-1:]:
            file.seek(at)
            file.write(bytes([whole[at] ^ 0x10]))
            file.flush()
            with pytest.raises((hs.FormatError, hs.VersionError)) as caught:
                model.restore(tmp_path / "s")
            seen |= {word for word in ("no saved session", "token ids", "table of checksums", "plain page", "index slab", "sealed page")
                     if word in str(caught.value)}
            file.seek(at)
            file.write(whole[at : at + 1])
            file.flush()
    assert seen == {"no saved session", "token ids", "table of checksums", "plain page", "index slab", "sealed page"}
    for field in range(8, 600, 4):
        damaged = bytearray(whole[:4096])
        damaged[field] ^= 1
        (tmp_path / "t").write_bytes(bytes(damaged) + whole[4096:])
        with pytest.raises((hs.FormatError, hs.VersionError)):
            model.restore(tmp_path / "t")
    assert counted(model) == before
    model.restore(tmp_path / "s").close()


def test_cut_or_longer_files(model, saved, tmp_path):
    whole = saved.read_bytes()
    for size in (0, 1, 4095, 4096, 5000, 8192, len(whole) // 2, len(whole) - 1):
        (tmp_path / "s").write_bytes(whole[:size])
        with pytest.raises(hs.FormatError, match="cut short|bytes of|no saved"):
            model.restore(tmp_path / "s")
    (tmp_path / "s").write_bytes(whole + b"x")
    with pytest.raises(hs.FormatError, match="bytes of"):
        model.restore(tmp_path / "s")


def test_what_is_no_saved_session(paths, model, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (paths / "tiny.hsr", tmp_path, "/dev/null", tmp_path / "pipe"):
        with pytest.raises(hs.FormatError):
            model.restore(path)
    with pytest.raises(hs.FileError):
        model.restore(tmp_path / "none")
    for path in ("", "a\0b"):
        with pytest.raises(hs.InvalidError):
            model.restore(path)


# ---- writing goes wrong -----------------------------------------------------------------------------------------------


def only(folder: Path, *names: str) -> bool:
    return sorted(os.listdir(folder)) == sorted(names)


def test_mode_link_and_old_file(model, tmp_path):
    (tmp_path / "old").write_bytes(b"old")
    os.chmod(tmp_path / "old", 0o644)
    os.symlink("old", tmp_path / "link")
    with model.session(context=200) as s:
        s.append(IDS[:100])
        s.save(tmp_path / "link")
        s.save(os.fsencode(tmp_path / "old"))
    assert os.path.islink(tmp_path / "link")
    assert stat.S_IMODE(os.stat(tmp_path / "old").st_mode) == 0o600
    model.restore(tmp_path / "link").close()
    assert only(tmp_path, "old", "link")


def test_places_that_cannot_be_written(model, tmp_path):
    os.mkdir(tmp_path / "folder")
    os.mkfifo(tmp_path / "pipe")
    os.symlink("nowhere", tmp_path / "dangling")
    with model.session(context=200) as s:
        s.append(IDS[:100])
        for path, error in ((tmp_path / "folder", hs.InvalidError), (tmp_path / "pipe", hs.InvalidError), ("/dev/null", hs.InvalidError),
                            (tmp_path / "none" / "s", hs.FileError), (tmp_path / "dangling", hs.FileError), ("/proc/s", hs.FileError),
                            (tmp_path / ("n" * 300), hs.FileError), (tmp_path / ("d/" * 3000) / "s", hs.FileError)):
            with pytest.raises(error):
                s.save(path)
        assert s.tokens == IDS[:100]
    assert only(tmp_path, "folder", "pipe", "dangling")


def test_progress_and_cancelling(model, tmp_path):
    told: list[tuple[int, int]] = []
    (tmp_path / "s").write_bytes(b"old")
    with model.session(context=4096, kv="f32", **SMALL) as s:
        s.append(IDS[:2000])
        s.save(tmp_path / "t", progress=lambda done, total: told.append((done, total)))
        assert told[0][0] == 0 and told[-1][0] == told[-1][1] > 0 and told == sorted(told)

        def stop(done, total):
            if done:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            s.save(tmp_path / "s", progress=stop)
        assert (tmp_path / "s").read_bytes() == b"old"
        assert only(tmp_path, "s", "t")
        s.save(tmp_path / "s")
    assert (tmp_path / "s").read_bytes() == (tmp_path / "t").read_bytes()


def test_restoring_is_followed_and_ended(model, tmp_path):
    with model.session(context=4096, kv="f32", **SMALL) as s:
        s.append(IDS[:2000])
        s.save(tmp_path / "s")
    told: list[tuple[int, int]] = []
    before = counted(model)
    model.restore(tmp_path / "s", progress=lambda done, total: told.append((done, total))).close()
    assert told[0][0] == 0 and told[-1][0] == told[-1][1] > 0 and told == sorted(told)

    def stop(done, total):
        if done:
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        model.restore(tmp_path / "s", progress=stop)
    timer = threading.Timer(0, signal.raise_signal, [signal.SIGINT])  # Ctrl-C of a caller who follows nothing
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        while True:
            model.restore(tmp_path / "s").close()
    timer.join()
    assert counted(model) == before


def test_states_in_which_a_session_cannot_be_saved(model, tmp_path):
    with model.session(context=1000) as s:
        s.append(IDS[:100])
        stream = s.generate(stream=True, max_tokens=50)
        next(iter(stream))
        with pytest.raises((hs.BusyError, hs.StateError)):
            s.save(tmp_path / "s")
        stream.close()
        s.save(tmp_path / "s")
    with pytest.raises(hs.StateError):
        s.save(tmp_path / "t")
    assert only(tmp_path, "s")


WRITER = """
import sys, resource, signal
import hisparse_rt as hs
model = hs.load(sys.argv[1], ram="64MiB", threads=1, kv="f32", calibration=False)
s = model.session(context=4096)
s.append([5 + i % 200 for i in range(2000)])
s.prefill()
def progress(done, total):
    if done:
        print("half", flush=True)
        if sys.argv[3] == "hang":
            signal.pause()
if sys.argv[3] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
try:
    s.save(sys.argv[2], progress=progress)
except hs.FileError as error:
    print(error.errno, error)
"""


def writer(paths, target, how: str, **more) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(WRITER), paths / "tiny.hsr", target, how], stdout=subprocess.PIPE,
                            text=True, **more)


def refuse_files_without_name() -> None:
    """As file systems do that have none: openat with O_TMPFILE fails with EOPNOTSUPP, in this process and for good."""
    libc, openat = ctypes.CDLL(None, use_errno=True), {"x86_64": 257, "aarch64": 56}[platform.machine()]
    flag = os.O_TMPFILE & ~os.O_DIRECTORY
    # Load the number; is it openat? Load its flags; is the one among them?
    code = [(0x20, 0, 0, 0), (0x15, 0, 3, openat), (0x20, 0, 0, 32), (0x45, 0, 1, flag),
            (0x06, 0, 0, 0x50000 | errno.EOPNOTSUPP), (0x06, 0, 0, 0x7FFF0000)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
    program = struct.pack("=H6xQ", len(code), ctypes.addressof(filters))
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
        os._exit(77)


def test_file_size_limit(paths, tmp_path):
    """An error, not the signal that would end the process."""
    (tmp_path / "s").write_bytes(b"old")
    process = writer(paths, tmp_path / "s", "limit")
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and out.startswith("27 ")
    assert (tmp_path / "s").read_bytes() == b"old"
    assert only(tmp_path, "s")


@pytest.mark.parametrize("nameless", [True, False])
def test_kill_leaves_the_old_file(paths, model, tmp_path, nameless):
    """And no other, unless the file system has no files without a name; that goes with the next one, and none that is another's."""
    (tmp_path / "s").write_bytes(b"old")
    theirs = {".hisparse-save-abc", ".hisparse-save-abcdefg", ".hisparse-save-folder"}
    for name in theirs - {".hisparse-save-folder"}:
        (tmp_path / name).write_bytes(b"")
    (tmp_path / ".hisparse-save-folder").mkdir()
    os.mkfifo(tmp_path / ".hisparse-save-a_pipe")
    theirs |= {".hisparse-save-a_pipe", "s"}
    process = writer(paths, tmp_path / "s", "hang", preexec_fn=None if nameless else refuse_files_without_name)
    said = process.stdout.readline()
    if not nameless and process.poll() == 77:
        pytest.skip("no system call can be refused here")
    assert said == "half\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    assert (tmp_path / "s").read_bytes() == b"old"
    left = set(os.listdir(tmp_path)) - theirs
    assert len(left) == (0 if nameless else 1) and all(name.startswith(".hisparse-save-") for name in left)
    living = writer(paths, tmp_path / "t", "hang", preexec_fn=None if nameless else refuse_files_without_name)
    assert living.stdout.readline() == "half\n"
    held = set(os.listdir(tmp_path)) - theirs
    assert len(held) == len(left) and not held & left
    with model.session(context=200) as s:
        s.append(IDS[:100])
        s.save(tmp_path / "s")
    model.restore(tmp_path / "s").close()
    assert set(os.listdir(tmp_path)) == theirs | held
    living.kill()
    living.wait(timeout=60)


def test_without_nameless_files(paths, model, tmp_path):
    process = writer(paths, tmp_path / "s", "write", preexec_fn=refuse_files_without_name)
    process.communicate(timeout=120)
    if process.returncode == 77:
        pytest.skip("no system call can be refused here")
    assert process.returncode == 0 and only(tmp_path, "s")
    model.restore(tmp_path / "s").close()


def test_full_disk(paths, model, tmp_path):
    """A file system of 1 MiB, where one can be made without being root."""
    mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    script = (f"mount -t tmpfs -o size=1m tmpfs '{tmp_path}' && echo old > '{tmp_path}/s' && \"$@\" && cat '{tmp_path}/s' && "
              f"ls -A '{tmp_path}'")
    run = subprocess.run([*mount, script, "sh", sys.executable, "-c", textwrap.dedent(WRITER), paths / "tiny.hsr", tmp_path / "s", "write"],
                         capture_output=True, text=True, timeout=120)
    if "mount" in run.stderr or "unshare" in run.stderr:
        pytest.skip("no file system can be mounted here")
    lines = run.stdout.splitlines()
    assert lines[0].startswith("28 ") and "bytes are needed" in lines[0], run
    assert lines[1:] == ["old", "s"]


# ---- beside others ----------------------------------------------------------------------------------------------------


def test_others_go_on_while_saving_and_restoring(model, tmp_path):
    before = counted(model)
    with model.session(context=4096, kv="bf16") as s:
        s.append(IDS[:500])
        want = go_on(s, 200)
    stop, results, failures = threading.Event(), [], []

    def generate():
        try:
            while not stop.is_set():
                with model.session(context=4096, kv="bf16") as session:
                    session.append(IDS[:500])
                    results.append(go_on(session, 200) == want)
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    def save_and_restore(number: int):
        try:
            with model.session(context=4096, kv="bf16", **SMALL) as session:
                session.append(IDS[number : LENGTH + number])
                session.save(tmp_path / f"{number}")
                expected = go_on(session)
            for _ in range(3):
                with model.restore(tmp_path / f"{number}") as session:
                    results.append(go_on(session) == expected)
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    beside = threading.Thread(target=generate)
    workers = [threading.Thread(target=save_and_restore, args=(i,)) for i in range(4)]
    for thread in [beside, *workers]:
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    beside.join()
    assert not failures and len(results) > 12 and all(results)
    assert counted(model) == before


def test_closing_the_model_waits_for_a_restore(paths, model, tmp_path):
    with model.session(context=4096, kv="f32") as s:
        s.append(IDS[:3000])
        s.save(tmp_path / "s")
    for delay in (0, 0.001, 0.004):
        other = hs.load(paths / "tiny.hsr", ram="64MiB", threads=1)
        outcome = []

        def restore(other=other, outcome=outcome):
            try:
                outcome.append(other.restore(tmp_path / "s"))
            except hs.HisparseError as error:
                outcome.append(error)

        thread = threading.Thread(target=restore)
        thread.start()
        time.sleep(delay)
        other.close()
        thread.join()
        assert other.closed and len(outcome) == 1


# ---- tiers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_pages_that_are_not_in_memory(paths, tmp_path, kv):
    """Saved out of a cold tier, and restored into one whose memory is smaller than the session."""
    cold, length = {"cold": str(tmp_path), "cold_size": "64MiB"}, 3500
    with hs.load(paths / "wide.hsr", ram="64MiB", threads=2) as model:
        with session_or_skip(model, kv) as s:
            s.append(IDS[:length])
            s.save(tmp_path / "all")
            want = s.logits(IDS[length : length + 100])
        with hs.load(paths / "wide.hsr", ram="5MiB", threads=2, chunk=64, **cold) as small:
            with pytest.raises(hs.NoSpaceError), hs.load(paths / "wide.hsr", ram="5MiB", threads=2, chunk=64) as without:
                without.restore(tmp_path / "all")
            with small.restore(tmp_path / "all") as r:
                r.save(tmp_path / "again")
                assert np.array_equal(r.logits(IDS[length : length + 100]), want)
            assert small.stats().cold_evictions > 0
            evicted = small.stats().cold_evictions
            with small.session(context=4096, kv=kv, **SMALL) as s:
                s.append(IDS[:length])
                s.save(tmp_path / "small")
            assert small.stats().cold_evictions > evicted
            assert counted(small) == (0, 0, 0, 0)
        for name in ("again", "small"):
            with model.restore(tmp_path / name) as r:
                assert np.array_equal(r.logits(IDS[length : length + 100]), want)
