# SPDX-License-Identifier: Apache-2.0
"""Calibration: the fitted bases, the file that holds them, and the command."""

from __future__ import annotations

import dataclasses
import json
import shutil

import hisparse_rt as hs
import numpy as np
import pytest
import shell
import tiny
from gguf import GGUFWriter
from hisparse_rt.calibration import Calibration, read_calibration, write_calibration
from hisparse_rt.eval.estimates import Head, Query, Setting, quantised, sketch
from hisparse_rt.profile import Profile
from hisparse_rt.tools.basis import about_page_means, attention, fit_basis, received_mass
from hisparse_rt.tools.calibrate import calibrate, default_ids
from hisparse_rt.tools.calibration_text import library_docstrings
from hisparse_rt.tools.convert import convert

pytestmark = pytest.mark.slow  # of the front and the tools; what it runs in C the other tests run too

RANDOM = np.random.default_rng(11)


# ---- the fit ----------------------------------------------------------------------------------------------------


def keys_and_queries(d: int = 16, n: int = 1024, m: int = 600):
    """Keys that vary in a few directions, with a large constant part; queries that look along some of those."""
    mix = RANDOM.standard_normal((4, d))
    keys = (RANDOM.standard_normal((n, 4)) @ mix + 0.05 * RANDOM.standard_normal((n, d)) + 30 * np.eye(d)[3]).astype(np.float32)
    queries = (RANDOM.standard_normal((m, 4)) @ mix + 0.05 * RANDOM.standard_normal((m, d))).astype(np.float32)
    return keys, queries


def test_all_components_give_the_exact_product():
    keys, queries = keys_and_queries()
    a, b = fit_basis(queries, keys, np.ones(len(keys)))
    np.testing.assert_allclose(a @ b.T, np.eye(16), atol=1e-9)
    deviation = about_page_means(keys)
    np.testing.assert_allclose((queries.astype(float) @ b) @ (deviation @ a).T, queries.astype(float) @ deviation.T, atol=1e-6)


def test_leading_components_carry_the_products():
    keys, queries = keys_and_queries()
    a, b = fit_basis(queries, keys, np.ones(len(keys)))
    deviation = about_page_means(keys)
    exact, four = queries @ deviation.T, (queries @ b[:, :4]) @ (deviation @ a[:, :4]).T
    assert np.square(four - exact).mean() < 0.01 * np.square(exact).mean()
    last = (queries @ b[:, -4:]) @ (deviation @ a[:, -4:]).T
    assert np.square(last).mean() < 0.01 * np.square(exact).mean()


def test_attended_keys_count_more():
    """The components turn to what attended keys differ in."""
    d, n = 16, 4096
    keys = RANDOM.standard_normal((n, d)) * 0.1
    keys[:, 0] *= 6  # the largest, and never attended
    rare = RANDOM.random(n) < 0.02
    keys[rare, 5] += 3
    queries = RANDOM.standard_normal((500, d))
    plain, _ = fit_basis(queries, keys, np.ones(n))
    told, _ = fit_basis(queries, keys, rare.astype(float))
    share = [np.abs(a[5, 0]) / np.linalg.norm(a[:, 0]) for a in (plain, told)]
    assert share[1] > 0.9 > 0.3 > share[0]


@pytest.mark.parametrize("keys", [np.zeros((128, 16)), np.ones((128, 16)), np.zeros((0, 16))], ids=["zero", "constant", "none"])
def test_keys_without_spread(keys):
    a, b = fit_basis(np.zeros((4, 16)), keys.astype(np.float32), np.zeros(len(keys)))
    np.testing.assert_allclose(a @ b.T, np.eye(16), atol=1e-9)


def test_received_mass_is_that_of_plain_softmax():
    n, heads, d, sink, window = 700, 3, 8, 64, 128
    keys, queries = RANDOM.standard_normal((n, d)).astype(np.float32), RANDOM.standard_normal((n, heads, d)).astype(np.float32)
    want = np.zeros(n)
    positions = np.arange(4, n, 5)
    for t in positions:
        score = (queries[t] @ keys[: t + 1].T).astype(float) * 0.7
        weight = np.exp(score - score.max(axis=1, keepdims=True))
        weight /= weight.sum(axis=1, keepdims=True)
        near = (t // 64 - window // 64 + 1) * 64
        if near > sink:
            want[sink:near] += weight[:, sink:near].sum(axis=0)
    got = received_mass(queries[positions], positions, keys, 0.7, sink, window)
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert want.sum() > 10 and want[:sink].sum() == 0
    last = attention(queries[[5, 9]], np.array([5, 9]), keys, 1.0)
    np.testing.assert_allclose(last.sum(axis=2), 1, rtol=1e-5)
    assert last.shape == (2, heads, 10) and not last[0, :, 6:].any()


def test_codes_are_within_half_a_step():
    z = RANDOM.standard_normal((5, 64, 24)).astype(np.float32)
    step = np.abs(z).max(axis=1, keepdims=True) / 7.5
    assert (np.abs(quantised(z) - z) <= step * 0.5001).all()
    assert not quantised(np.zeros((1, 64, 3), np.float32)).any() or np.abs(quantised(np.zeros((1, 64, 3), np.float32))).max() < 1e-30


# ---- a model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrate")
    cfg = tiny.config(max_position_embeddings=4096)
    tiny.write_hf(folder / "hf", cfg, tiny.weights(cfg, 3))
    convert(folder / "hf", folder / "tiny.hsr", dtype="f32")
    tiny.write_hf(folder / "other", cfg, tiny.weights(cfg, 4))
    convert(folder / "other", folder / "other.hsr", dtype="f32")
    tiny.write_hf(folder / "mute", cfg, tiny.weights(cfg, 3), tokenizer=None)
    convert(folder / "mute", folder / "mute.hsr", dtype="f32")
    return folder


@pytest.fixture(scope="module")
def made(models):
    with hs.load(models / "tiny.hsr", calibration=False, threads=2) as model:
        ids = RANDOM.integers(3, 300, 2048).astype(np.int32)
        seen: list = []
        calibration, facts = calibrate(model, ids, lambda done, total: seen.append((done, total)))
        assert seen[-1] == (4096, 4096) and seen == sorted(seen)
        with model.session(context=2048, profile=0) as session:
            session.append(ids)
            session.prefill()
            np.testing.assert_allclose(calibration.mean_k[1], session.keys(1).mean(axis=0), atol=1e-4)
            np.testing.assert_allclose(calibration.mean_v[0], session.values(0).mean(axis=0), atol=1e-4)
    assert len(facts) == 2 and all(0 < fact.recall_gaussian <= 1 and 0 < fact.recall_sketch <= 1 for fact in facts)
    return calibration


def test_a_model_is_calibrated(models, made):
    assert made.basis_k.shape == (2, 2, 16, 16) and made.mean_v.shape == (2, 2, 16) and made.gap.shape == (2,)
    with hs.load(models / "tiny.hsr", calibration=False) as model:
        assert made.fingerprint == model.metadata("hisparse.source")
        with pytest.raises(hs.InvalidError, match="at least 2048 tokens; there are 100"):
            calibrate(model, np.arange(3, 103, dtype=np.int32))


def test_the_runtime_takes_what_was_written(models, made, tmp_path):
    write_calibration(tmp_path / "tiny.hsrcal", made)
    shutil.copy(models / "tiny.hsr", tmp_path / "tiny.hsr")
    ids = RANDOM.integers(3, 300, 1500).astype(np.int32)
    with hs.load(tmp_path / "tiny.hsr", threads=2) as model:
        assert model.calibrated
        with model.session(profile=Profile(selector="sketch", budget=64)) as session:
            session.append(ids)
            session.prefill()
            assert np.isfinite(session.logits([5])).all() and session.stats().sparse_rows > 0
    with hs.load(tmp_path / "tiny.hsr", calibration=False) as model:
        assert not model.calibrated
        with pytest.raises(hs.UnsupportedError, match="sketch needs the model's calibration"):
            model.session(profile=Profile(selector="sketch"))


def test_classes_of_layers_decide_budgets(models, made, tmp_path):
    """Those of the file; one from before there were classes is read, and refused where a profile names some."""
    shutil.copy(models / "tiny.hsr", tmp_path / "tiny.hsr")
    write_calibration(tmp_path / "tiny.hsrcal", dataclasses.replace(made, sketched=np.array([False, True])))
    ids = RANDOM.integers(3, 300, 1400).astype(np.int32)
    by_class = Profile(selector="sketch", budget=512, class_budgets=(("gaussian", 64),), window_size=64, dense_classes=("sketch",))
    by_layer = Profile(selector="sketch", budget=512, layer_budgets=((0, 64),), window_size=64, dense_layers=(1,))
    rows = []
    with hs.load(tmp_path / "tiny.hsr", threads=2) as model:
        for profile in (by_class, by_layer):
            with model.session(profile=profile) as session:
                session.append(ids)
                session.prefill()
                rows.append(session.logits([5]))
    assert np.array_equal(*rows)
    write_calibration(tmp_path / "tiny.hsrcal", dataclasses.replace(made, sketched=None))
    for calibration in (None, False):
        with hs.load(tmp_path / "tiny.hsr", calibration=calibration) as model, pytest.raises(hs.InvalidError, match="no classes of layers"):
            model.session(profile=by_class)


# ---- the file ---------------------------------------------------------------------------------------------------


def test_round_trip(made, tmp_path):
    path = tmp_path / "x.hsrcal"
    write_calibration(path, made)
    read = read_calibration(path, made.fingerprint)
    for field in dataclasses.fields(Calibration):
        np.testing.assert_array_equal(getattr(read, field.name), getattr(made, field.name))
    assert read.classes == tuple("sketch" if gap > 0.04 else "gaussian" for gap in made.gap)
    write_calibration(path, dataclasses.replace(made, sketched=None))
    assert read_calibration(path).classes is None
    assert [item.name for item in tmp_path.iterdir()] == ["x.hsrcal"], "no temporary file stays"
    with pytest.raises(hs.FileError, match="cannot write"):
        write_calibration(tmp_path / "missing" / "x.hsrcal", made)


def test_values_that_cannot_be(made):
    bad = made.mean_k.copy()
    bad[1, 0, 3] = np.nan
    with pytest.raises(hs.InvalidError, match="mean_k of layer 1 holds a value that is not finite"):
        dataclasses.replace(made, mean_k=bad)
    with pytest.raises(hs.InvalidError, match=r"basis_q has the shape \[2, 2, 16, 8\], not \[2, 2, 16, 16\]"):
        dataclasses.replace(made, basis_q=made.basis_q[..., :8])
    with pytest.raises(hs.InvalidError, match="of layer 1 do not belong together"):
        dataclasses.replace(made, basis_q=np.stack([made.basis_q[0], 2 * made.basis_q[1]]))


def damaged(path, made: Calibration, leave=(), **changes) -> None:
    """Write a calibration file with some metadata or tensors changed or left out."""
    writer = GGUFWriter(path, changes.pop("architecture", "hisparse-calibration"))
    writer.add_uint32("hisparse.cal.version", changes.pop("version", 1))
    writer.add_string("hisparse.cal.fingerprint", changes.pop("fingerprint", made.fingerprint))
    for name in ("n_layers", "n_kv_heads", "head_dim"):
        writer.add_uint32(f"hisparse.cal.{name}", changes.pop(name, getattr(made, name)))
    for name in ("virtual", "gap"):
        if name not in leave:
            values = changes.pop(name, getattr(made, name))
            writer.add_array(f"hisparse.cal.{name}", [int(value) if name == "virtual" else float(value) for value in values])
    for layer in range(made.n_layers):
        for name in ("basis_k", "basis_q", "mean_k", "mean_v"):
            full = f"cal.{layer}.{name}"
            if full not in leave:
                writer.add_tensor(full, np.ascontiguousarray(changes.pop(full, getattr(made, name)[layer])))
    assert not changes
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


DAMAGE = [
    ({"architecture": "llama"}, hs.FormatError, "no calibration file"),
    ({"version": 2}, hs.VersionError, "version 2, this library reads"),
    ({"fingerprint": "sha256:0"}, hs.FormatError, "made for other weights"),
    ({"head_dim": 32}, hs.FormatError, "head_dim|not F32|fit the file"),
    ({"n_layers": 3}, hs.FormatError, "do not fit the file|n_layers is 3"),
    ({"leave": ("cal.1.mean_v",)}, hs.FormatError, "cal.1.mean_v'? is missing"),
    ({"leave": ("virtual",)}, hs.FormatError, "virtual"),
    ({"cal.1.basis_k": np.zeros((2, 16, 8), np.float32)}, hs.FormatError, "cal.1.basis_k"),
    ({"cal.0.mean_k": np.full((2, 16), np.inf, np.float32)}, hs.FormatError, "mean_k"),
    ({"virtual": [1, 0, 1]}, hs.FormatError, "virtual"),
]  # fmt: skip


@pytest.mark.parametrize("changes, kind, text", DAMAGE, ids=lambda value: str(value)[:30])
def test_damaged_files_are_refused_by_both_readers(models, made, tmp_path, changes, kind, text):
    path = tmp_path / "bad.hsrcal"
    damaged(path, made, **changes)
    with pytest.raises(kind, match=text) as caught:
        read_calibration(path, made.fingerprint)
    assert "bad.hsrcal" in str(caught.value)
    with pytest.raises(kind, match=text) as caught:
        hs.load(models / "tiny.hsr", calibration=path)
    assert "bad.hsrcal" in str(caught.value)


def test_other_weights_and_cut_files(models, made, tmp_path):
    path = tmp_path / "x.hsrcal"
    write_calibration(path, made)
    with pytest.raises(hs.FormatError, match="made for other weights"):
        hs.load(models / "other.hsr", calibration=path)
    whole = path.read_bytes()
    for size in (0, 3, 20, len(whole) // 2, len(whole) - 64):
        path.write_bytes(whole[:size])
        with pytest.raises(hs.FormatError):
            read_calibration(path)
    with pytest.raises(hs.FileMissingError):
        read_calibration(tmp_path / "none.hsrcal")


# ---- the command ------------------------------------------------------------------------------------------------


def test_the_command(models, tmp_path):
    model = tmp_path / "tiny.hsr"
    shutil.copy(models / "tiny.hsr", model)
    done = shell.run("calibrate", model, "--tokens", 2048, "--json", "--threads", 1)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["tokens"] == 2048 and len(report["layers"]) == 2 and report["file"] == str(tmp_path / "tiny.hsrcal")
    with hs.load(model) as loaded:
        assert loaded.calibrated
        calibration = read_calibration(tmp_path / "tiny.hsrcal", loaded.metadata("hisparse.source"))
    assert [layer["virtual"] for layer in report["layers"]] == calibration.virtual.tolist()
    assert [layer["class"] for layer in report["layers"]] == ["sketch" if gap > 0.04 else "gaussian" for gap in calibration.gap]
    before = (tmp_path / "tiny.hsrcal").read_bytes()
    assert shell.run("calibrate", model, "--tokens", 2048, "--threads", 2).returncode == 0
    assert (tmp_path / "tiny.hsrcal").read_bytes() == before, "the same bytes every time, with any number of threads"


def test_conversions_calibrate(models, tmp_path):
    for _ in range(2):
        with hs.load(models / "hf", dtype="f32", cache_dir=tmp_path / "made", threads=2) as model:
            assert model.calibrated
    (made,) = (tmp_path / "made").glob("*.hsrcal")
    assert read_calibration(made).n_layers == 2
    with hs.load(models / "hf", dtype="f32", cache_dir=tmp_path / "none", calibration=False) as model:
        assert not model.calibrated and not list((tmp_path / "none").glob("*.hsrcal"))
    with hs.load(models / "mute", dtype="f32", cache_dir=tmp_path / "mute") as model:
        assert not model.calibrated, "a model without tokenizer computes all the same"
    for options, found in (((), True), (("--no-calibrate",), False)):
        target = tmp_path / f"{found}.hsr"
        done = shell.run("convert", models / "hf", target, "--dtype", "f32", *options)
        assert done.returncode == 0 and not done.stderr and target.with_suffix(".hsrcal").exists() == found


def test_a_calibration_of_weights_that_were_replaced_is_removed(models, tmp_path):
    target, sidecar = tmp_path / "m.hsr", tmp_path / "m.hsrcal"
    other = tmp_path / "other"
    cfg = tiny.config(max_position_embeddings=4096)
    tiny.write_hf(other, cfg, tiny.weights(cfg, 99))
    assert shell.run("convert", models / "hf", target, "--dtype", "f32").returncode == 0
    done = shell.run("convert", models / "hf", target, "--dtype", "q8", "--no-calibrate")
    assert done.returncode == 0 and done.stderr == "" and sidecar.exists(), "the same weights"
    done = shell.run("convert", other, target, "--no-calibrate")
    assert done.returncode == 0 and "made for other weights, and is removed" in done.stderr and not sidecar.exists()
    assert shell.run("generate", target, "-p", "x", "--raw", "--max-tokens", 1).returncode == 0


def test_the_command_refuses(models, tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    shell.fails("calibrate", models / "tiny.hsr", "--text", tmp_path / "short.txt", text="at least 2048 tokens")
    shell.fails("calibrate", models / "tiny.hsr", "--text", tmp_path / "binary.txt", text="not UTF-8")
    shell.fails("calibrate", models / "tiny.hsr", "--text", tmp_path / "none.txt", text="none.txt")
    shell.fails("calibrate", models / "mute.hsr", text="needs the model's tokenizer")
    shell.fails("calibrate", models / "tiny.hsr", "--out", tmp_path / "no" / "x", text="there is no folder")
    shell.fails("calibrate", models / "tiny.hsr", "--out", models / "tiny.hsr", text="this command reads it")
    shell.fails("calibrate", models / "tiny.hsr", "--tokens", 100, code=2, text="must be from 2048")
    for option in ("--kv=int8", "--profile=fast", "--cold=/tmp", "--no-calibrate"):  # what it would not follow it does not take
        shell.fails("calibrate", models / "tiny.hsr", option, code=2, text="unrecognized arguments")


def test_the_default_text_is_the_same_every_time(models):
    assert library_docstrings(20000) == library_docstrings(20000)
    assert 20000 <= len(library_docstrings(20000)) < 60000
    with hs.load(models / "tiny.hsr", calibration=False) as model:
        ids = default_ids(model, tokens=3000)
        assert len(ids) == 3000 and len(default_ids(model)) == 4096, "no longer than the model was trained for"


# ---- what is measured -------------------------------------------------------------------------------------------


def test_the_sketch_finds_what_stands_out():
    """One key of many is attended; the page mean hides it, the sketch does not."""
    n, d = 2048, 16
    keys = RANDOM.standard_normal((n, d)).astype(np.float32) * 0.3
    queries = RANDOM.standard_normal((4, d)).astype(np.float32)
    keys[777] = 3 * queries[0]
    values = RANDOM.standard_normal((n, d)).astype(np.float32)
    a, b = fit_basis(RANDOM.standard_normal((500, d)), keys, np.ones(n))
    query = Query(Head(keys, values, 1.0, a.astype(np.float32), b.astype(np.float32)), queries[:1], n - 1, Setting(64, 64, 128))
    assert query.weights[0, 777] > 0.9
    outcome = query.outcome(lambda head, q, pages: sketch(head, q, pages, 16))
    assert outcome.recall[0] > 0.9 and abs(outcome.covered[0] - outcome.recall[0]) < 0.1


def test_a_calibration_is_no_model(made, tmp_path):
    """It lies beside the model, and the names differ in the last letters."""
    write_calibration(tmp_path / "tiny.hsrcal", made)
    with pytest.raises(hs.FormatError, match="tiny.hsrcal: the calibration of a model, not a model"):
        hs.load(tmp_path / "tiny.hsrcal")


@pytest.mark.parametrize("options, error, text", [
    ({"profile": 5}, TypeError, "a profile is"), ({"profile": True}, TypeError, "a profile is"),
    ({"profile": "nope"}, hs.InvalidError, "no profile 'nope'"), ({"profile": {"budget": 1}}, hs.InvalidError, "budget is 1"),
    ({"calibration": "nowhere"}, hs.FileMissingError, "'nowhere': no such file"),
])  # fmt: skip
def test_options_are_checked_before_a_conversion(models, tmp_path, options, error, text):
    with pytest.raises(error, match=text):
        hs.load(models / "hf", cache_dir=tmp_path / "cache", **options)
    assert not (tmp_path / "cache").exists()
