# SPDX-License-Identifier: Apache-2.0
"""The quality harness: its statistics, its rules in NumPy, and its measurements on tiny models."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import hisparse_rt as hs
import numpy as np
import pytest
import shell
import tiny
from hisparse_rt.calibration import write_calibration
from hisparse_rt.eval.curve import curve
from hisparse_rt.eval.estimates import Head, Query, Setting, exact, gaussian, sketch, top
from hisparse_rt.eval.forced import Prompts, forced
from hisparse_rt.eval.index_bytes import clusters_read, index_read
from hisparse_rt.eval.needle import KINDS, Needle, ask, needles, prompt_ids, retrieve
from hisparse_rt.eval.ppl import perplexity
from hisparse_rt.eval.recall import Truth, recall
from hisparse_rt.eval.statistics import compare, interval, log_softmax, summary
from hisparse_rt.profile import PRESETS, Profile
from hisparse_rt.tools.calibrate import attention_scale, calibrate
from hisparse_rt.tools.convert import convert
from tokenizers import Tokenizer

pytestmark = pytest.mark.slow  # of the front and the tools; what it runs in C the other tests run too

RANDOM = np.random.default_rng(5)
RULES = {"exact": exact, "sketch": sketch, "gaussian": gaussian}
EVERYTHING = Profile(selector="oracle", budget=1 << 20, forced_history=0)
NOTHING = Profile(selector="random", budget=16, forced_history=0, virtual_tokens=False)
TEXT = " ".join(f"line {i}: {word}" for i, word in enumerate(RANDOM.choice(["fox", "dog", "cats", "hello", "world", "x * x"], 4000)))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    cfg = tiny.config(max_position_embeddings=4096)
    tiny.write_hf(folder / "hf", cfg, tiny.weights(cfg, 3))
    convert(folder / "hf", folder / "tiny.hsr", dtype="f32")
    with hs.load(folder / "tiny.hsr", calibration=False) as model:
        calibration, _ = calibrate(model, np.asarray(model.encode(TEXT), np.int32)[:2048])
    write_calibration(folder / "tiny.hsrcal", calibration)
    return folder / "tiny.hsr"


@pytest.fixture(scope="module")
def model(path):
    with hs.load(path, threads=2) as model:
        yield model


# ---- statistics -------------------------------------------------------------------------------------------------


def test_distances():
    dense = log_softmax(np.array([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]], np.float32))
    other = log_softmax(np.array([[2.0, 1.0, 0.0], [3.0, 0.0, 0.0]], np.float32))
    found = compare(dense, other, np.array([2, 1], np.int32))
    p, q = np.exp(dense[0]), np.exp(other[0])
    assert found.kl[0] == pytest.approx((p * np.log(p / q)).sum()) and found.kl[1] == 0
    assert found.loss[0] == pytest.approx(2.0) and found.loss[1] == 0
    assert found.same_top.tolist() == [False, True]


def test_tokens_that_cannot_come_do_not_count():
    rows = log_softmax(np.array([[0.0, 1.0, -np.inf]], np.float32))
    assert compare(rows, rows, np.array([0], np.int32)).kl[0] == 0


def test_intervals():
    values = RANDOM.exponential(1, 400)
    low, high = interval(values)
    assert low < values.mean() < high and (low, high) == interval(values)
    assert high - low == pytest.approx(4 * values.std() / 20, rel=0.3)
    rising = np.repeat(RANDOM.exponential(1, 25), 16)  # neighbours alike: fewer independent values, a wider interval
    low, high = interval(rising)
    assert high - low > 2 * 4 * rising.std() / 20
    assert interval(np.full(3, 2.0)) == pytest.approx((2, 2))


def test_summaries_join_runs():
    one = compare(log_softmax(RANDOM.standard_normal((20, 9)).astype(np.float32)), log_softmax(np.zeros((20, 9), np.float32)),
                  np.zeros(20, np.int32))
    both = summary([one, one])
    assert both["tokens"] == 40 and both["kl_mean"] == pytest.approx(one.kl.mean()) and 0 <= both["top1_agreement"] <= 1


# ---- rules ------------------------------------------------------------------------------------------------------


def head(n: int = 1280, d: int = 16) -> Head:
    keys, values = (RANDOM.standard_normal((n, d)).astype(np.float32) for _ in range(2))
    return Head(keys, values, 0.5, np.eye(d, dtype=np.float32), np.eye(d, dtype=np.float32))


def test_reading_everything_misses_nothing():
    case = head()
    query = Query(case, RANDOM.standard_normal((3, 16)).astype(np.float32), 1279, Setting(1 << 20, 64, 128))
    for rule in RULES.values():
        outcome = query.outcome(rule)
        np.testing.assert_allclose(outcome.recall, 1, rtol=1e-5)
        assert outcome.error < 1e-9 and outcome.error_virtual < 1e-9


def test_the_exact_rule_is_the_best_of_equal_budgets():
    query = Query(head(), RANDOM.standard_normal((2, 16)).astype(np.float32), 1279, Setting(256, 64, 128))
    best = query.outcome(exact)
    np.testing.assert_allclose(best.recall, best.covered, rtol=1e-5)
    for name, rule in RULES.items():
        assert query.outcome(rule).recall.sum() <= best.recall.sum() + 1e-6, name
    np.testing.assert_allclose(query.best(16), best.recall, rtol=1e-5)
    drawn = np.sort(RANDOM.choice(np.arange(4, query.end * 4), 16, replace=False))
    assert best.recall.mean() > query.recall(drawn).mean() + 0.1


def test_virtual_tokens_are_exact_where_values_are_alike():
    case = head()
    case.values[:] = np.repeat(RANDOM.standard_normal((20, 16)), 64, axis=0)
    case = Head(case.keys, case.values, 0.5)
    outcome = Query(case, RANDOM.standard_normal((2, 16)).astype(np.float32), 1279, Setting(64, 64, 128)).outcome(exact)
    assert outcome.error > 1e-3 and outcome.error_virtual < 1e-9


def test_ties_go_to_the_earlier():
    assert np.flatnonzero(top(np.array([1.0, 2.0, 2.0, 2.0, 0.0]), 2)).tolist() == [1, 2]


# ---- bytes ------------------------------------------------------------------------------------------------------


def test_bytes_of_the_index_by_hand():
    """Heads of 64: entries of 192 bytes and codes of 768 for a page; mean values of 68."""
    tail = 4 * (192 + 768)
    assert clusters_read(256, 4096, 64) == tail  # no whole segment
    assert clusters_read(8192 + 256, 8192, 64) == 8192 * 14 + 128 * 68 + tail  # all of it are candidates
    assert clusters_read(3 * 8192, 4096, 64) == 3 * 8192 * 1.75 + 4096 * 14 + 384 * 68
    million = 128 * 8192
    assert clusters_read(million, 4096, 64) == million * 1.75 / 15 + 32 * 4096 * 1.75 + 4096 * 14 + 4096 * 68
    assert clusters_read(million, 4096, 64) < million * 16 / 10  # of what a flat scan of the records reads

    stats = SimpleNamespace(n_computed=64 + 512 + 3 * 8192 + 63, index_bytes=77)
    info = SimpleNamespace(n_layers=3, n_kv_heads=2, head_dim=64)
    cluster = Profile(selector="cluster", budget=1024, dense_layers=(1,))
    assert index_read(cluster, info, stats, True) == 2 * 2 * clusters_read(3 * 8192, 4096, 64)
    assert index_read(replace(cluster, layer_budgets=((2, 2048),)), info, stats, True) == 2 * (
        clusters_read(3 * 8192, 4096, 64) + clusters_read(3 * 8192, 8192, 64))
    tenth = 16 * 154  # of 1536 units, rounded up
    assert index_read(replace(cluster, sparse_ratio=0.1), info, stats, True) == 2 * 2 * clusters_read(3 * 8192, 4 * tenth, 64)
    assert index_read(Profile(selector="sketch"), info, stats, True) == 77 == index_read(PRESETS["balanced"], info, stats, False)
    assert index_read(PRESETS["exact"], info, stats, True) == 0 == index_read(Profile(selector="oracle"), info, stats, True)
    assert index_read(Profile(selector="mean", dense_layers=(1,)), info, stats, True) == 2 * 2 * 384 * (8 + 2 * 64)
    assert index_read(Profile(selector="random"), info, SimpleNamespace(n_computed=9000, index_bytes=0), True) == 0


# ---- a model ----------------------------------------------------------------------------------------------------


def test_reading_everything_is_dense(model):
    result = perplexity(model, {"text": TEXT}, {"all": EVERYTHING, "none": NOTHING}, contexts=[1000, 1500], tokens=12)
    everything, nothing = result["profiles"]["all"], result["profiles"]["none"]
    assert everything["tokens"] == 24 and everything["kl_mean"] == 0 and everything["kl_p95"] == 0
    assert everything["top1_agreement"] == 1 and everything["perplexity"] == pytest.approx(result["dense"]["perplexity"], abs=1e-12)
    assert nothing["kl_mean"] > 1e-5 and nothing["attended_tokens"] < 650 < everything["attended_tokens"]
    assert nothing["bytes_read_per_token"] < everything["bytes_read_per_token"]


def test_prompts_under_a_profile_and_what_follows_them(model):
    """Each part has an effect of its own, and none where everything is read."""
    few = replace(NOTHING, window_size=64, prefill_budget=128, prefill_dense_below=0)
    everything = replace(EVERYTHING, window_size=64, prefill_budget=1 << 20, prefill_dense_below=0)
    result = perplexity(model, {"text": TEXT}, {"few": few, "all": everything}, contexts=[1300], tokens=8,
                        parts=["decode", "prefill", "both"])["profiles"]
    assert {name: row["part"] for name, row in result.items()} == {
        "few": "decode", "few, prefill": "prefill", "few, both": "both", "all": "decode", "all, prefill": "prefill", "all, both": "both"}
    assert [result[name]["kl_mean"] for name in ("all", "all, prefill", "all, both")] == [0, 0, 0]
    decode, prefill, both = (result[name] for name in ("few", "few, prefill", "few, both"))
    assert len({round(row["kl_mean"], 9) for row in (decode, prefill, both)}) == 3 and min(row["kl_mean"] for row in (prefill, both)) > 1e-6
    assert decode["attended_tokens"] == both["attended_tokens"] < 300 and prefill["attended_tokens"] == 1308
    assert decode["covered_estimated"] < 1 and both["covered_estimated"] < 1 and math.isnan(prefill["covered_estimated"])
    for profile, text in ((replace(few, prefill_dense_below=1300), "dense up to 1300 tokens"), (replace(few, prefill_budget=0), "always")):
        with pytest.raises(hs.InvalidError, match=f"slow, prefill: its prompts are {text}"):
            perplexity(model, {"text": TEXT}, {"slow": profile}, contexts=[1300], tokens=8, parts=["prefill"])


def test_dense_attention_over_another_format(model):
    """The same keys and values rounded: a small distance, and none to itself."""
    exact = {"exact": PRESETS["exact"]}
    assert perplexity(model, {"text": TEXT}, exact, contexts=[600], tokens=8)["profiles"]["exact"]["kl_mean"] == 0
    rounded = perplexity(model, {"text": TEXT}, exact, contexts=[600], tokens=8, against_kv="bf16", parts=["decode", "both"])
    assert rounded["dense"]["kv"] == "bf16" and list(rounded["profiles"]) == ["exact"]
    assert 0 < rounded["profiles"]["exact"]["kl_mean"] < 1e-3


def test_true_cover(model):
    """An oracle knows what it reads; with all in reach it reads all."""
    truth = Truth(attention_scale(model), 3)
    oracle = Profile(selector="oracle", budget=128, forced_history=0, virtual_tokens=False)
    result = perplexity(model, {"text": TEXT}, {"all": EVERYTHING, "some": oracle}, contexts=[1300], tokens=6, truth=truth)["profiles"]
    assert result["all"]["covered_true"] == pytest.approx(1, abs=1e-5)
    some = result["some"]
    assert some["covered_true"] == pytest.approx(some["covered_estimated"], abs=0.02) and some["covered_true"] < 0.95


def test_captured_selections(model):
    """What was selected for a position holds as much of the attention as what NumPy selects by the model's own keys and queries."""
    oracle = Profile(selector="oracle", budget=128, forced_history=0, virtual_tokens=False, dense_layers=(1,))
    ids = np.asarray(model.encode(TEXT), np.int32)[:1310]
    share = model.info.n_heads // model.info.n_kv_heads
    with model.session(profile=oracle) as session:
        session.logits(ids[:1300])
        with session.capture(5, first=1301, stride=2, slices=9) as captured:
            for token in ids[1300:]:
                session.logits([token])
        keys = session.keys(0)
    assert (captured.n_slices[1] == -1).all() and (captured.n_slices[0] == 8).all() and not np.isnan(captured.queries).any()
    for g in range(model.info.n_kv_heads):
        padded = np.pad(keys[:, g], ((0, -len(keys) % 64), (0, 0)))
        head = Head(padded, padded, attention_scale(model))
        for row, position in enumerate(range(1301, 1310, 2)):
            query = Query(head, captured.queries[0, row, g * share : (g + 1) * share], position, Setting(128))
            got = captured.slices[0, row, g, :8]
            assert (np.diff(got) > 0).all() and got[0] >= 4 and got[-1] < query.end * 4
            np.testing.assert_allclose(query.recall(got), query.outcome(exact).recall, atol=2e-3)


def test_forced_rows_are_those_of_the_whole_text(model):
    ids = np.asarray(model.encode(TEXT), np.int32)[:900]
    whole = log_softmax(model.logits(ids))
    with Prompts(model, ids[:880], 20) as prompts, prompts.fork(PRESETS["exact"]) as session:
        run = forced(session, ids[880:])
    np.testing.assert_array_equal(run.logprobs, whole[880:])
    assert math.isnan(run.covered) and run.attended == 900


def test_short_texts_and_long_contexts(model):
    with pytest.raises(hs.InvalidError, match="text has .* tokens, and 1009 are needed"):
        perplexity(model, {"text": "short"}, {"all": EVERYTHING}, contexts=[1000], tokens=8)
    with pytest.raises(hs.ContextError, match="pass the 4096"):
        perplexity(model, {"text": TEXT}, {"all": EVERYTHING}, contexts=[4090], tokens=8)


@pytest.mark.parametrize("kind", KINDS)
def test_facts_lie_where_they_should(model, kind):
    for needle in needles(kind, 0.5, 0):
        ids = prompt_ids(model, TEXT, 1500, needle.facts)
        text = model.decode(ids, skip_special=True)
        assert len(ids) == 1500 and all(fact in text for _, fact in needle.facts) and needle.answer in text
        assert needles(kind, 0.5, 0) == needles(kind, 0.5, 0) != needles(kind, 0.5, 1)
        for depth, fact in needle.facts:
            if kind == "single":
                assert text.index(fact) / len(text) == pytest.approx(depth, abs=0.15)


def test_needles(model):
    result = retrieve(model, TEXT, {"all": EVERYTHING}, lengths=[1200], depths=[0.2, 0.8], kinds=["single", "several"])
    assert len(result["cases"]) == 2 + 2 * 4
    for case in result["cases"]:
        assert case["all"] == case["dense"] and case["dense"]["logprob"] < 0 and isinstance(case["dense"]["found"], bool)
    assert result["summary"]["all"]["logprob_loss"] == 0 and result["summary"]["dense"]["of"] == 10


@pytest.mark.parametrize("wrong", [None, 0, 3])
def test_found_is_every_token_of_the_answer(tmp_path, wrong):
    """A model that recites: it has the answer, or says another token at one place of it."""
    needle = Needle("single", 0.5, (), "The number is", "4371")
    tokenizer = Tokenizer.from_str(tiny.tokenizer_json())
    question, whole = (tokenizer.encode(text, add_special_tokens=False).ids for text in (needle.question, "The number is 4371"))
    said = whole[len(question) - 1 :]
    assert whole[: len(question)] == question and len(set(said)) == len(said) > 4
    successor = dict(zip(said, said[1:], strict=False))
    if wrong is not None:
        successor[said[wrong]] = said[0]
    convert(tiny.script_model(tmp_path / "hf", successor), tmp_path / "m.hsr", "f32")
    with hs.load(tmp_path / "m.hsr", threads=1, calibration=False) as model, model.session(beyond_trained=True) as session:
        session.append([3, 4, 5])
        found = ask(session, needle)
    assert found["found"] is (wrong is None) and found["logprob"] < 0


def test_recall(model):
    """What the runtime selects by exact scores is what NumPy finds best, head by head; others find less, a random one least."""
    ids = np.asarray(model.encode(TEXT), np.int32)[:2048]
    profiles = {name: Profile(selector=name, budget=128, virtual_tokens=False) for name in ("oracle", "sketch", "random")}
    result = recall(model, ids, attention_scale(model), profiles, queries=4)
    mean = result["mean"]
    assert mean["oracle"]["recall"] == pytest.approx(mean["oracle"]["oracle"], abs=2e-3)
    assert mean["random"]["recall"] < mean["sketch"]["recall"] < mean["sketch"]["oracle"] < 1
    assert mean["random"]["recall"] < mean["random"]["oracle"] - 0.05
    assert len(result["layers"]) == 2 and len(result["layers"][0]["heads"]) == 2
    for layer in result["layers"]:
        for head in layer["heads"]:
            np.testing.assert_allclose(head["oracle"]["recall_of_heads"], head["oracle"]["oracle_of_heads"], atol=5e-3)
            assert len(head["random"]["recall_of_heads"]) == 2 and head["random"]["recall"] <= head["random"]["oracle"]
    with pytest.raises(hs.InvalidError, match="1000 tokens are too few for 4 queries"):
        recall(model, ids[:1000], 1.0, profiles, queries=4)


def test_curve(model):
    result = curve(model, {"text": TEXT}, Profile(forced_history=0), selectors=["oracle", "random"], budgets=[16, 1 << 20], contexts=[1200],
                   tokens=6)
    points = {(point["selector"], point["budget"]): point for point in result["points"]}
    assert len(points) == 4 and points["oracle", 1 << 20]["kl_mean"] == 0 < points["random", 16]["kl_mean"]


def test_curve_has_a_row_for_history(model):
    """Whose prompt was heard: it is not what an empty history, the first pages, would give."""
    base = Profile(window_size=64, virtual_tokens=False)
    result = curve(model, {"text": TEXT}, base, selectors=["history"], budgets=[64, 1 << 20], contexts=[1200], tokens=6)
    few, all_pages = result["points"]
    assert few["selector"] == "history" and few["attended_tokens"] <= 3 * 64
    assert all_pages["kl_mean"] == 0 < few["kl_mean"]
    beside = curve(model, {"text": TEXT}, replace(base, forced_history=4), selectors=["minmax"], budgets=[64], contexts=[1200], tokens=6)
    assert beside["points"][0]["attended_tokens"] > 6 * 64


# ---- the command ------------------------------------------------------------------------------------------------


def test_the_command(path, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "all.json").write_text('{"selector": "oracle", "budget": 100000, "dense_below": 0, "forced_history": 0}')
    text, profile = tmp_path / "text.txt", tmp_path / "all.json"
    common = ("--threads", 1, "--json")
    runs = {
        "ppl": ("--text", text, "--context", 1000, "--tokens", 4, "--profile", profile, "--compare", "fast", "--truth", 1),
        "needle": ("--text", text, "--lengths", 1000, "--depths", "0.5", "--profile", profile),
        "recall": ("--text", text, "--context", 2048, "--queries", 2, "--budget", 64, "--selectors", "oracle,sketch"),
        "curve": ("--text", text, "--context", 1000, "--tokens", 4, "--selectors", "sketch,random", "--budgets", "16,64"),
    }
    found = {}
    for name, options in runs.items():
        done = shell.run("eval", name, path, *options, *common)
        assert done.returncode == 0 and not done.stderr, done.stderr
        found[name] = json.loads(done.stdout)
        table = shell.run("eval", name, path, *options, *common[:-1])
        assert table.returncode == 0 and len(table.stdout.splitlines()) >= 2, table.stderr
    assert found["ppl"]["profiles"][str(profile)]["kl_mean"] == 0 and "fast" in found["ppl"]["profiles"]
    assert found["needle"]["summary"][str(profile)]["logprob_loss"] == 0
    assert set(found["recall"]["mean"]) == {"oracle", "sketch"}
    assert len(found["curve"]["points"]) == 4
    formats = shell.run("eval", "ppl", path, "--text", text, "--context", 700, "--tokens", 4, "--kv", "bf16", *common)
    exact = json.loads(formats.stdout)["profiles"]  # f32 is what the model has by itself
    assert list(exact) == ["exact"] and exact["exact"]["kl_mean"] > 0
    same = shell.run("eval", "ppl", path, "--text", text, "--context", 700, "--tokens", 4, "--kv", "bf16", "--against-kv", "bf16", *common)
    assert list(json.loads(same.stdout)["profiles"]) == ["balanced"]


def test_a_picture_of_a_curve(path, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "text.txt").write_text(TEXT)
    options = ("--text", tmp_path / "text.txt", "--context", 1000, "--tokens", 4, "--selectors", "oracle,random", "--budgets", "16,100000")
    done = shell.run("eval", "curve", path, *options, "--plot", tmp_path / "curve.svg")
    assert done.returncode == 0, done.stderr
    drawn = (tmp_path / "curve.svg").read_text()
    assert all(f"<!-- {name} -->" in drawn for name in ("oracle", "random", "dense"))
    shell.fails("eval", "curve", path, *options, "--plot", tmp_path / "curve.bmp", text=r"a picture is one of \.svg")


def test_defaults_fit_the_model(tmp_path):
    """Without lengths a command measures what the model was trained for."""
    cfg = tiny.config(max_position_embeddings=2048)
    convert(tiny.write_hf(tmp_path / "hf", cfg, tiny.weights(cfg)), tmp_path / "m.hsr", "q8")
    for name, options in {"ppl": ("--tokens", 4), "curve": ("--tokens", 4, "--selectors", "mean", "--budgets", 64),
                          "needle": ("--depths", 0.5), "recall": ("--queries", 2, "--selectors", "mean")}.items():
        done = shell.run("eval", name, tmp_path / "m.hsr", *options, "--json", "--threads", 1)
        assert done.returncode == 0, (name, done.stderr)
        found = json.loads(done.stdout)
        assert name not in ("ppl", "curve") or found["contexts"] == [2044]


def test_the_command_refuses(path, tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    shell.fails("eval", "ppl", path, "--text", tmp_path / "short.txt", text="tokens, and 4097 are needed")
    shell.fails("eval", "ppl", path, "--text", tmp_path / "none.txt", text="none.txt")
    shell.fails("eval", "ppl", path, "--profile", "turbo", text="known presets")
    shell.fails("eval", "ppl", path, "--context", 700, "--profile", "fast", "--parts", "both", text="fast, both: .* up to 32768 tokens")
    shell.fails("eval", "ppl", path, "--parts", "prompt", code=2, text="'prompt' is not one of decode, prefill, both")
    shell.fails("eval", "ppl", path, "--context", "a", code=2, text="not a whole number")
    shell.fails("eval", "needle", path, "--depths", "2", code=2, text="a depth is from 0")
    shell.fails("eval", "needle", path, "--kinds", "hay", code=2, text="'hay' is not one of single")
    shell.fails("eval", "recall", path, "--selectors", "auto", code=2, text="'auto' is not one of sketch, mean")
