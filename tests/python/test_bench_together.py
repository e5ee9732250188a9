# SPDX-License-Identifier: Apache-2.0
"""bench --together and --compare: depths and profiles that decode in turns, in one process."""

from __future__ import annotations

import json

import hisparse_rt as hs
import pytest
import tiny
from hisparse_rt.bench import together
from hisparse_rt.profile import PRESETS, Profile
from hisparse_rt.profile_index import serving_all
from hisparse_rt.tools.convert import convert
from shell import fails, run

pytestmark = pytest.mark.slow  # of the front and the tools; what it runs in C the other tests run too


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    cfg = tiny.config(max_position_embeddings=1024, eos_token_id=tiny.NULL)
    convert(tiny.write_hf(folder / "hf", cfg, tiny.weights(cfg)), folder / "tiny.hsr", "f32")
    return folder / "tiny.hsr"


@pytest.fixture
def few(tmp_path):
    """A profile that reads little."""
    file = tmp_path / "few.json"
    file.write_text('{"selector": "minmax", "budget": 16, "window_size": 64, "sink_size": 64, "dense_below": 0}')
    return file


def measured(*arguments):
    done = run("bench", *arguments, "--json", "-")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_profiles_are_compared_on_the_same_session(path, few) -> None:
    written = measured(path, "--depths", 700, "--compare", few, "--repeats", 2, "--decode-tokens", 3)
    dense, sparse = written["rows"]
    assert (dense["profile"], sparse["profile"]) == ("exact", str(few)) and len(written["opened"]) == 1
    assert dense["speed_ratio"] == 1 and sparse["speed_ratio"] == pytest.approx(dense["median_ms"] / sparse["median_ms"])
    for row in (dense, sparse):
        assert row["depth"] == 700 and row["steps"] == 6 and len(row["runs"]) == 2 and row["time_ratio"] == 1
        assert row["session"]["n_tokens"] == 700 + 2 * 4 and row["ours"] == pytest.approx(1e3 / row["median_ms"])
    shares = written["opened"][0]["prefill_shares"]
    assert shares["attend"] > 0 and shares["seal"] > 0 and shares["select"] == shares["cluster"] == 0 and sum(shares.values()) < 1
    assert written["opened"][0]["computed_tokens"] == 700 and written["rss_peak_bytes"] > 1 << 20
    assert dense["session"]["sparse_rows"] == 0 and sparse["session"]["sparse_rows"] == 8
    assert sparse["session"]["attended_tokens"] <= 64 + 128 + 16
    assert dense["select_share"] == 0 < sparse["select_share"] < sparse["attention_share"] < 1 and 0 < dense["attention_share"] < 1


def test_depths_and_batches_take_turns_beside_a_saved_session(path, few, tmp_path) -> None:
    saved = tmp_path / "saved"
    assert run("bench", path, "--depths", 300, "--save", saved, "--decode-tokens", 2).returncode == 0
    written = measured(path, "--together", "--depths", "100,500", "--restore", saved, "--batch", 2, "--repeats", 2, "--decode-tokens", 3)
    assert [(row["depth"], row["batch"]) for row in written["rows"]] == [(depth, batch) for depth in (100, 300, 500) for batch in (1, 2)]
    assert [one["computed_tokens"] for one in written["opened"]] == [200, 0, 1000] and written["opened"][1]["restore_seconds"] > 0
    for i, row in enumerate(written["rows"]):
        assert row["time_ratio"] == pytest.approx(row["median_ms"] / written["rows"][i % 2]["median_ms"])
        assert row["ours"] == pytest.approx(1e3 * row["batch"] / row["median_ms"]) and row["session"]["n_tokens"] == row["depth"] + 8
    table = run("bench", path, "--together", "--depths", "100,200", "--repeats", 1, "--decode-tokens", 2).stdout.splitlines()
    assert len(table) == 3 and "speed/exact" in table[0] and "time/100" in table[0]


def test_long_sessions_share_what_was_computed(path) -> None:
    written = measured(path, "--together", "--context", "64K", "--fill", "synthetic", "--batch", 2, "--kv", "bf16", "--repeats", 1,
                       "--decode-tokens", 2)
    assert written["opened"][0]["computed_tokens"] == 8192
    alone, both = written["rows"]
    assert alone["session"]["n_tokens"] == both["session"]["n_tokens"] == 65536 + 3
    shorter = measured(path, "--together", "--context", "32K", "--fill", "synthetic", "--batch", 2, "--kv", "bf16", "--repeats", 1,
                       "--decode-tokens", 2)
    assert shorter["opened"][0]["computed_tokens"] == 2 * 8192


def test_rows_by_hand() -> None:
    def member(depth, profile, *turns):
        return {"depth": depth, "batch": 2, "profile": profile, "kv": "bf16", "session": {},
                "turns": [{"first": seconds[0] * 10, "steps": list(seconds), "waited": 0.5, "selecting": [0.25, 0.25],
                           "attention": [second / 2 for second in seconds]} for seconds in turns]}

    members = [member(8, "a", (1, 2), (3, 10)), member(8, "b", (1, 1), (1, 1)), member(9, "a", (5, 5), (5, 5))]
    found = together.rows({"members": members}, "q4")
    assert [(row["median_ms"], row["mean_ms"], row["p99_ms"]) for row in found] == [(2500, 4000, 10000), (1000,) * 3, (5000,) * 3]
    assert [row["speed_ratio"] for row in found] == [1, 2.5, 1] and [row["time_ratio"] for row in found] == [1, 1, 2]
    assert [row["mean_time_ratio"] for row in found] == [1, 1, 1.25] and found[0]["runs"] == [1500, 6500]
    assert found[0]["ours"] == 0.8 and found[0]["first_ms"] == 20000 and found[0]["wait_share"] == pytest.approx(1 / 16)
    assert [row["attention_ms"] for row in found] == [1250, 500, 2500] and [row["attention_ratio"] for row in found] == [1, 2.5, 1]
    assert found[0]["attention_share"] == 0.5 and found[0]["select_share"] == 0.1 and found[0]["select_ms"] == 250
    assert len({len(line) for line in together.table(found).splitlines()}) == 1


@pytest.mark.parametrize("arguments, text", [
    (("--together", "--peers", "openvino", "--peer-model", "f"), "without --peers, --save and --plot"),
    (("--compare", "fast", "--depths", "8", "--save", "f"), "without --peers"), (("--together", "--plot", "a.svg"), "without --peers"),
    (("--compare", "fast", "--compare", "fast"), "measured already"), (("--compare", "exact"), "measured already"),
    (("--together", "--restore", "f", "--fill", "synthetic"), "--restore takes the place"),
])  # fmt: skip
def test_wrong_usage(arguments, text) -> None:
    """Told before the model is opened."""
    fails("bench", "no-such-model", *arguments, code=2, text=text)


def test_what_one_session_cannot_serve(path, tmp_path) -> None:
    fails("bench", path, "--depths", 8, "--compare", "turbo", text="known presets")
    (tmp_path / "wide.json").write_text('{"window_size": 1024, "selector": "minmax"}')
    fails("bench", path, "--depths", 8, "--compare", "fast", "--compare", tmp_path / "wide.json", text="windows or sinks")
    fails("bench", path, "--depths", "1000", "--together", "--repeats", 9, "--decode-tokens", 2, text="28 tokens more pass the 1024")


def test_options_that_serve_all_profiles() -> None:
    sketch, minmax, mean = (Profile(selector=name) for name in ("sketch", "minmax", "mean"))
    history, gaussian = Profile(selector="mean", forced_history=4), Profile(selector="gaussian", window_size=128)
    exact, fast = PRESETS["exact"], PRESETS["fast"]
    assert serving_all({"exact": exact, "fast": fast}, True) == {"index": "cluster"}
    assert serving_all({"exact": exact, "fast": fast}, False) == {"index": "minmax"}
    assert serving_all({"exact": exact}, True) == {"index": "none"}
    assert serving_all({"sketch": sketch, "fast": fast, "mean": mean}, True) == {"index": "cluster"}
    assert serving_all({"mean": mean, "minmax": minmax}, True) == {"index": "minmax"}
    assert serving_all({"exact": exact, "gaussian": gaussian}, True) == {"index": "gaussian", "window_size": 128}
    assert serving_all({"history": history, "mean": mean}, True) == {"index": "sketch"}
    with pytest.raises(hs.InvalidError, match="minmax reads an index of kind minmax and fast one of kind cluster"):
        serving_all({"exact": exact, "minmax": minmax, "fast": fast}, True)
    with pytest.raises(hs.InvalidError, match="history reads a history of attention.* under exact"):
        serving_all({"exact": exact, "history": history}, True)
    with pytest.raises(hs.InvalidError, match="mean and gaussian want windows"):
        serving_all({"mean": mean, "gaussian": gaussian}, False)
