# SPDX-License-Identifier: Apache-2.0
"""bench: what it counts, who it asks and in what order, and what it says when something is missing. Not how fast anything is."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import hisparse_rt as hs
import pytest
import tiny
from hisparse_rt.bench import bounds, ceilings, job, programs, report, rounds
from hisparse_rt.bench.job import Options, Point
from hisparse_rt.bench.programs import LimitError, MeasureError, Program
from hisparse_rt.bench.rounds import Limits, Rounds, Samples
from hisparse_rt.tools.convert import convert
from shell import command, fails, run

pytestmark = pytest.mark.slow  # of the front and the tools; what it runs in C the other tests run too

ROW_KEYS = {"work", "depth", "batch", "dtype", "kv", "ours", "peers", "ratio", "bound", "of_bound", "runs", "details", "kl"}

# Of the tiny model: 2 layers, hidden 64, intermediate 96, 4 heads and 2 kv heads of 16, vocabulary 320.
LAYER_WEIGHTS = (4 + 2 * 2) * 16 * 64 + 64 * 4 * 16 + 2 * 96 * 64 + 64 * 96
KV_COMPONENTS = 2 * 2 * 2 * 16
"""Of one token: layers, kv heads, key and value, head size."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    cfg = tiny.config(max_position_embeddings=1024, eos_token_id=tiny.NULL)
    return tiny.write_hf(tmp_path_factory.mktemp("source"), cfg, tiny.weights(cfg))


@pytest.fixture(scope="module")
def path(folder, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.hsr"
    convert(folder, path, "f32")
    return path


@pytest.fixture
def peer(tmp_path):
    """Makes an interpreter that answers as a peer's measuring script does, with Python of our own for an answer."""

    def make(name: str, answer: str, kv: str = "f16") -> str:
        script = tmp_path / f"{name}.py"
        script.write_text(
            "import json, sys, time\n"
            f"if sys.argv[2:] == ['probe']:\n    print(json.dumps({{'version': '{name} 1', 'kv': '{kv}'}}))\n    sys.exit()\n"
            f"job = json.load(sys.stdin)\n{answer}\n"
        )
        interpreter = tmp_path / name
        interpreter.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
        interpreter.chmod(0o755)
        return str(interpreter)

    return make


@pytest.fixture
def weights(tmp_path) -> Path:
    path = tmp_path / "weights.gguf"
    path.write_bytes(b"only peers read this")
    return path


# ---- the command ------------------------------------------------------------------------------------------------


def test_rows(path, tmp_path) -> None:
    done = run("bench", path, "--depths", "64,16", "--repeats", 2, "--decode-tokens", 4, "--threads", 1, "--json", tmp_path / "b.json")
    assert done.returncode == 0 and "1 threads" in done.stderr and "[4/4] ours, 64 tokens: prefill" in done.stderr, done.stderr
    written = json.loads((tmp_path / "b.json").read_text())
    found = written["rows"]
    assert [(row["work"], row["depth"]) for row in found] == [("prefill", 16), ("prefill", 64), ("decode", 16), ("decode", 64)]
    assert (written["threads"], written["dtype"], written["skipped"], written["peers"]) == (1, "f32", [], {})
    for row in found:
        assert set(row) == ROW_KEYS and row["batch"] == 1 and row["kv"] == "f32" and row["peers"] == {} and row["ratio"] is None
        assert len(row["runs"]["ours"]) == 2 and min(row["runs"]["ours"]) <= row["ours"] <= max(row["runs"]["ours"])
        assert row["of_bound"] == pytest.approx(row["ours"] / row["bound"])
    lines = done.stdout.splitlines()
    assert len(lines) == 5 and lines[0].split()[:2] == ["work", "depth"] and "of bound" in lines[0] and "(f32)" in lines[1]


def test_json_on_standard_output_and_a_batch(path) -> None:
    done = run("bench", path, "--depths", "16", "--repeats", 1, "--decode-tokens", 3, "--batch", 3, "--json", "-", "--kv", "bf16")
    found = json.loads(done.stdout)["rows"]
    assert [(row["work"], row["batch"]) for row in found] == [("prefill", 1), ("decode", 1), ("decode", 3)]
    assert all(row["kv"] == "bf16" and row["ours"] > 0 for row in found)
    assert {"kv": "bf16", "chunk": 512, "isa": "auto"}.items() <= json.loads(done.stdout)["options"].items()


def test_a_prompt_is_computed_once_and_used_again(path, tmp_path) -> None:
    saved = tmp_path / "long.hsrsave"
    done = run("bench", path, "--depths", "100", "--decode-tokens", 3, "--save", saved, "--json", "-")
    written = json.loads(done.stdout)
    assert written["repeats"] == 1 and written["rows"][0]["details"]["save_seconds"] > 0 and saved.stat().st_size > 0
    done = run("bench", path, "--restore", saved, "--decode-tokens", 3, "--repeats", 2, "--batch", 2, "--json", "-")
    assert "ours, 100 tokens: decode" in done.stderr and "prefill" not in done.stderr, done.stderr
    found = json.loads(done.stdout)["rows"]
    assert [(row["work"], row["depth"], row["batch"]) for row in found] == [("decode", 100, 1), ("decode", 100, 2)]
    for row in found:
        assert row["ours"] > 0 and row["details"]["restore_seconds"] > 0 and row["details"]["first_step_seconds"] > 0
        assert row["details"]["wait_share"] == 0
        assert row["details"]["session"]["n_computed"] >= 103 and row["details"]["session"]["prefill_tokens"] <= 1

    done = run("bench", path, "--restore", saved, "--kv", "int8")
    assert done.returncode == 1 and "kv_format is int8, the session was saved with" in done.stderr
    begun = Path(f"{saved}.begun")  # the length is in its first block: told before the rest is read
    begun.write_bytes(saved.read_bytes()[:4096])
    os.truncate(begun, saved.stat().st_size)
    done = run("bench", path, "--restore", begun, "--decode-tokens", 2000)
    assert done.returncode == 1 and "100 tokens do not fit" in done.stderr and "--beyond-trained allows it" in done.stderr, done.stderr
    saved.write_bytes(saved.read_bytes()[:-4097])
    done = run("bench", path, "--restore", saved)
    assert done.returncode == 1 and "long.hsrsave" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_bounds_are_what_was_measured_over_what_was_counted(path) -> None:
    """From the report alone: the ceilings it states and the work counted by hand."""
    written = json.loads(run("bench", path, "--depths", "100", "--repeats", 1, "--decode-tokens", 9, "--json", "-").stdout)
    prefill, decode = written["rows"]
    operations = 2 * 2 * LAYER_WEIGHTS + 4 * 4 * 16 * 2 * (100 + 1) / 2
    assert prefill["bound"] == pytest.approx(written["ceilings"]["operations_per_second"] / operations)
    n_bytes = 4 * (2 * LAYER_WEIGHTS + 5 * 64 + 320 * 64 + KV_COMPONENTS * 105)  # 9 steps see 101 to 109 tokens
    (read,) = written["ceilings"]["read"]
    assert read["bytes"] == n_bytes
    assert decode["bound"] == pytest.approx(read["bytes_per_second"] / n_bytes)
    assert written["ceilings"]["level"] == ("avx512" if written["isa"] == "amx" else written["isa"])


@pytest.mark.parametrize("arguments, text", [
    (("--depths", "64,x"), "'x' is not a whole number"), (("--depths", "0"), "from 1"), (("--depths", ""), "512 or 64K"),
    (("--depths", "4G"), "4G"), (("--context", "2048M"), "from 1"),
    (("--repeats", "0"), "--repeats"), (("--batch", "1"), "--batch"), (("--limit", "0"), "--limit"), (("--budget", "x"), "--budget"),
    (("--peers", "ollama"), "'ollama' is no peer; known are llama.cpp, openvino"), (("--peers", "openvino,openvino"), "twice"),
    (("--peers", "openvino"), "--peer-model"), (("--peer-python", "openvino"), "PEER=INTERPRETER"),
    (("--restore", "f", "--fill", "synthetic"), "--restore takes the place"),
    (("--restore", "f", "--depths", "8"), "--restore takes the place"), (("--save", "f"), "one depth"),
    (("--save", "f", "--depths", "8,16"), "one depth"), (("--save", "f", "--context", "8", "--batch", "2"), "one"),
    (("--peer-python", "vllm=/usr/bin/python3"), "'vllm' is no peer"), (("--peer-python", "openvino=python3"), "--peers does not"),
])  # fmt: skip
def test_wrong_usage(arguments, text) -> None:
    """Told before the model is opened."""
    fails("bench", "no-such-model", *arguments, code=2, text=text)


def test_failures_in_one_line(path, tmp_path, weights) -> None:
    with_peer = ("bench", path, "--depths", "8", "--peers", "openvino", "--peer-model")
    fails(*with_peer, tmp_path / "no.gguf", text="no.gguf: no such file")
    fails(*with_peer, weights, "--peer-python", f"openvino={tmp_path}/python", text=f"cannot run {tmp_path}/python: no such program")
    fails("bench", path, "--depths", "1000", text="1000.*1024.*--beyond-trained")
    fails("bench", path, "--depths", "8", "--plot", tmp_path / "picture.bmp", text=r"picture.bmp: a picture is one of \.svg")
    fails("bench", path, "--depths", "8", "--json", weights, "--peers", "openvino", "--peer-model", weights, text="this command reads it")


def test_depths_that_the_model_was_not_trained_for(path) -> None:
    done = run("bench", path, "--repeats", 1, "--decode-tokens", 2, "--json", "-")
    assert "depths above 512 are left out" in done.stderr and [row["depth"] for row in json.loads(done.stdout)["rows"]] == [512, 512]
    done = run("bench", path, "--depths", "2K", "--beyond-trained", "--repeats", 1, "--decode-tokens", 2, "--json", "-")
    assert json.loads(done.stdout)["rows"][0]["depth"] == 2048


def test_a_budget_of_memory_that_is_too_small(path, tmp_path) -> None:
    """Said at once where nothing can be measured, before anything is computed, and as a row without numbers where something can."""
    arguments = ("bench", path, "--repeats", 1, "--decode-tokens", 2, "--ram", "1MiB", "--beyond-trained", "--depths")
    assert "nothing" not in run(*arguments, "16").stderr
    fewer = run(*arguments, "16,60000", "--json", "-")
    assert fewer.returncode == 0, fewer.stderr
    written = json.loads(fewer.stdout)
    assert written["rows"][1]["ours"] is None and written["rows"][1]["of_bound"] is None
    assert (written["skipped"][0]["program"], written["skipped"][0]["depth"]) == ("ours", 60000)
    assert re.search("60000 tokens do not fit: short of memory: [0-9.]+ MiB are needed, 1.0 MiB are there", written["skipped"][0]["reason"])
    short = "hisparse-rt: {} tokens do not fit: short of {}: [0-9.]+ .iB are needed, [0-9.]+ .iB are there; [0-9.]+ .iB more would do"
    for options in ((), ("--fill", "synthetic"), ("--fill", "synthetic", "--batch", 2)):
        only = run(*arguments, "60000", *options)
        assert only.returncode == 1 and only.stdout == "" and "Traceback" not in only.stderr
        assert re.fullmatch(short.format(60000, "memory"), only.stderr.splitlines()[-1])
        assert "prefill" not in only.stderr
    cold = ("--cold", tmp_path, "--cold-size", "1MiB", "--chunk", 64)
    only = run("bench", path, "--context", "60000", "--fill", "synthetic", "--ram", "24MiB", *cold)
    assert re.fullmatch(short.format(60000, "cold storage"), only.stderr.splitlines()[-1]), only.stderr


QUICK_BARS = """
import tqdm

class Quick(tqdm.tqdm):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs | {"delay": 0, "mininterval": 0, "miniters": 1})

tqdm.tqdm = Quick
"""


def test_long_work_is_shown_on_a_terminal(path, tmp_path) -> None:
    """With bars that draw every step, so that no computer is too fast to show one."""
    (tmp_path / "sitecustomize.py").write_text(QUICK_BARS)
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    screen, ours = pty.openpty()
    with subprocess.Popen(command("bench", path, "--context", "16K", "--fill", "synthetic", "--kv", "bf16", "--repeats", 1,
                                  "--decode-tokens", 2, "--save", tmp_path / "saved"), stdout=subprocess.DEVNULL, stderr=ours,
                          env=os.environ | {"PYTHONPATH": paths}) as process:  # fmt: skip
        os.close(ours)
        seen = b""
        with contextlib.suppress(OSError):      # the other side is closed
            while data := os.read(screen, 4096):
                seen += data
    os.close(screen)
    assert process.returncode == 0, seen
    assert re.search(rb"computing: +[0-9]+%", seen) and re.search(rb"filling: +[0-9]+%", seen)
    assert b"ours, 16384 tokens: prefill" in seen


def test_a_batch_of_more_sessions_than_an_engine_has_by_itself(path) -> None:
    done = run("bench", path, "--depths", 8, "--batch", 300, "--repeats", 1, "--decode-tokens", 2, "--json", "-")
    assert done.returncode == 0 and not json.loads(done.stdout)["skipped"], done.stderr


# ---- peers ------------------------------------------------------------------------------------------------------


def test_absent_peers_are_left_out_by_name(path, tmp_path, weights, peer) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -E -s -S "$@"\n')  # a Python with no packages at all
    bare.chmod(0o755)
    done = run("bench", path, "--depths", "16", "--repeats", 1, "--peers", "llama.cpp,openvino", "--peer-model", weights,
               "--peer-python", f"llama.cpp={bare}", "--peer-python", f"openvino={bare}", "--json", "-")
    assert done.returncode == 0 and json.loads(done.stdout)["peers"] == {}
    for name, package in (("llama.cpp", "llama-cpp-python"), ("openvino", "openvino-genai")):
        lines = [line for line in done.stderr.splitlines() if line.startswith(name)]
        assert len(lines) == 1 and lines[0].startswith(f"{name} is left out: {package} is not installed for {bare}")


def test_peers_take_turns_and_the_better_one_counts(path, tmp_path, weights, peer) -> None:
    log = tmp_path / "log"
    answer = ("open({log!r}, 'a').write(json.dumps([{name!r}, len(job['prompts'][0]), len(job['prompts']), job['decode_tokens'],"
              " job['threads'], job['model'], job['prompts'][0] == job['warm_up']]) + '\\n')\n"
              "print(json.dumps({{'prefill': {prefill}, 'decode': {decode}, 'kv': 'x'}}))")
    pythons = [
        f"{name}={peer(name, answer.format(log=str(log), name=name, prefill=prefill, decode=decode), kv)}"
        for name, prefill, decode, kv in (("llama.cpp", 100.0, 40.0, "f16"), ("openvino", 200.0, 20.0, "u8"))
    ]
    arguments = ["bench", path, "--depths", "16,32", "--repeats", 2, "--decode-tokens", 5, "--threads", 1, "--peers", "openvino,llama.cpp",
                 "--peer-model", weights, "--peer-python", pythons[0], "--peer-python", pythons[1]]
    done = run(*arguments, "--json", tmp_path / "b.json")
    assert done.returncode == 0, done.stderr
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    assert [call[:2] for call in calls] == [
        ["openvino", 16], ["llama.cpp", 16], ["openvino", 32], ["llama.cpp", 32],
        ["llama.cpp", 16], ["openvino", 16], ["llama.cpp", 32], ["openvino", 32],
    ]
    assert all(call[2:] == [1, 5, 1, str(weights), False] for call in calls)
    written = json.loads((tmp_path / "b.json").read_text())
    assert written["peer_model"] == {"path": str(weights), "types": {}}
    assert written["peers"] == {name: {"version": f"{name} 1", "kv": kv} for name, kv in (("openvino", "u8"), ("llama.cpp", "f16"))}
    speeds = {"prefill": {"openvino": 200.0, "llama.cpp": 100.0}, "decode": {"openvino": 20.0, "llama.cpp": 40.0}}
    for row in written["rows"]:
        assert row["peers"] == speeds[row["work"]] and row["ratio"] == pytest.approx(row["ours"] / max(row["peers"].values()))
    assert "openvino (u8)" in done.stdout and "llama.cpp (f16)" in done.stdout and "x" in done.stdout.splitlines()[1]


def test_a_peer_that_fails_or_dawdles_does_not_spoil_the_rest(path, weights, peer) -> None:
    slow = peer("llama.cpp", "if len(job['prompts'][0]) > 16: time.sleep(60)\nprint(json.dumps({'prefill': 1, 'decode': 1, 'kv': 'x'}))")
    broken = peer("openvino", "print('a library says hello')\nsys.exit('no such operator: Gather')")
    done = run("bench", path, "--depths", "16,24,32", "--repeats", 2, "--decode-tokens", 2, "--limit", "8", "--peers", "llama.cpp,openvino",
               "--peer-model", weights, "--peer-python", f"llama.cpp={slow}", "--peer-python", f"openvino={broken}", "--json", "-")
    assert done.returncode == 0, done.stderr
    written = json.loads(done.stdout)
    reasons = {(one["program"], one["depth"]): one["reason"] for one in written["skipped"]}
    assert "took more than 8 s" in reasons["llama.cpp", 24] and reasons["llama.cpp", 32] == "24 tokens were too many already"
    assert len(reasons) == len(written["skipped"]) == 5  # said once, not once a round
    assert reasons["openvino", 16] == "no such operator: Gather (exit code 1)" and reasons["openvino", 16] in done.stderr
    prefill = written["rows"][:3]
    assert [row["peers"]["llama.cpp"] for row in prefill] == [1, None, None]
    assert [row["ratio"] is None for row in prefill] == [False, True, True]
    assert all(row["ours"] and row["peers"]["openvino"] is None for row in written["rows"])


# ---- counting ---------------------------------------------------------------------------------------------------


def test_the_shape_of_a_model(path, folder, tmp_path) -> None:
    with hs.load(path, threads=1, ram="1MiB") as model:
        shape = bounds.shape_of(model)
    assert shape.projection_weights == 2 * LAYER_WEIGHTS
    assert shape.step_bytes == 4 * (2 * LAYER_WEIGHTS + 5 * 64 + 320 * 64)
    cfg = tiny.config(tie_word_embeddings=True)
    convert(tiny.write_hf(tmp_path / "tied", cfg, tiny.weights(cfg)), tmp_path / "tied.hsr", "q8")
    with hs.load(tmp_path / "tied.hsr", threads=1, ram="1MiB") as model:
        tied = bounds.shape_of(model)
        assert model.info.weight_bytes >= tied.step_bytes
    packed = 34 / 32  # 32 codes and a scale
    assert tied.projection_weights == shape.projection_weights
    assert tied.step_bytes == packed * (2 * LAYER_WEIGHTS + 320 * 64) + 4 * 5 * 64  # the embedding is the head


def test_bytes_and_operations() -> None:
    """SmolLM2-135M, by hand: 30 layers of 576 x 960, 576 x 576, 576 x 3072, 1536 x 576; 9 heads and 3 kv heads of 64."""
    projections = 30 * (576 * 960 + 576 * 576 + 576 * 3072 + 1536 * 576)
    shape = bounds.Shape(30, 9, 3, 64, projections, 90_000_000, "q4")
    assert projections == 106_168_320
    assert bounds.prefill_operations(shape, 2048) == 212_336_640 + 4 * 9 * 64 * 30 * 1024.5
    assert bounds.kv_bytes(shape, "bf16", 8192, 0) == 8192 * 23_040
    assert bounds.kv_bytes(shape, "f32", 1, 0) == 46_080
    assert bounds.kv_bytes(shape, "a format of tomorrow", 8192, 777) == 777
    assert bounds.decode_bytes(shape, 188_743_680, 1) == 278_743_680
    assert bounds.decode_bytes(shape, 1_000_000, 8) == 98_000_000
    assert [bounds.level(isa, dtype) for isa, dtype in (("amx", "q8"), ("amx", "f32"), ("avx2", "f32"))] == ["amx", "avx512", "avx2"]


def test_distance_beside_speed(path, tmp_path) -> None:
    """That of `eval ppl` after the longest prompt, in rows of decoding under a sparse profile."""
    (tmp_path / "p.json").write_text('{"selector": "random", "budget": 64, "window_size": 64, "dense_below": 0}')
    asked = ("--profile", tmp_path / "p.json", "--no-calibrate", "--threads", 1)
    options = ("--depths", "100", "--repeats", 1, "--decode-tokens", 2, "--kl", "--json", tmp_path / "report.json")
    done = run("bench", path, *options, *asked)
    prefill, decode = (written := json.loads((tmp_path / "report.json").read_text()))["rows"]
    assert done.stdout.splitlines()[0].split()[-1] == "KL" and done.stdout.splitlines()[2].split()[-1] == f"{decode['kl']:.4f}"
    context, tokens = written["kl"]["context"], written["kl"]["tokens"]
    assert prefill["kl"] is None and (context, tokens) == (1024 - 64, 64)
    said = run("eval", "ppl", path, *asked, "--context", context, "--tokens", tokens, "--json")
    (wanted,) = json.loads(said.stdout)["profiles"].values()
    assert decode["kl"] == wanted["kl_mean"] > 0
    done = run("bench", path, *options[:-2], *asked[2:], "--compare", tmp_path / "p.json")
    exact, sparse = (line.split()[-1] for line in done.stdout.splitlines()[1:])
    assert (exact, sparse) == ("-", f"{decode['kl']:.4f}"), done.stderr
    fails("bench", path, "--depths", 8, "--kl", text="--kl is of sparse profiles, and all are dense")


def test_bounds_of_a_sparse_profile_count_what_it_reads(path, tmp_path) -> None:
    """By hand, from the statistics: attended tokens, and the index, of which minmax scans all."""
    (tmp_path / "p.json").write_text('{"selector": "minmax", "budget": 64, "window_size": 64, "dense_below": 0}')
    options = ("--depths", "1000", "--repeats", 1, "--decode-tokens", 3, "--profile", tmp_path / "p.json", "--no-calibrate", "--json", "-")
    written = json.loads(run("bench", path, *options).stdout)
    _prefill, decode = written["rows"]
    stats = decode["details"]["session"]
    assert stats["sparse_rows"] and stats["attended_tokens"] <= 64 + 64 + 128 and stats["index_bytes"] > 0
    n_bytes = 4 * (2 * LAYER_WEIGHTS + 5 * 64 + 320 * 64 + KV_COMPONENTS * stats["attended_tokens"]) + stats["index_bytes"]
    (read,) = written["ceilings"]["read"]
    assert read["bytes"] == pytest.approx(n_bytes, abs=1)
    assert decode["bound"] == pytest.approx(read["bytes_per_second"] / read["bytes"])


class FixedCeilings(ceilings.Ceilings):
    def __init__(self) -> None:
        super().__init__(Path("none"), 2, "amx")
        self._multiplies = [3e12, 2e12, 9e12]
        self._reads.default_factory = lambda: [20e9, 30e9]


def test_rows_by_hand() -> None:
    shape = bounds.Shape(1, 2, 1, 16, 1000, 5000, "q4")
    samples, options = Samples(), Options(decode_tokens=3, threads=2)
    one, many, unmeasured, sparse = Point(10), Point(10, 4), Point(20), Point(30)
    for prefill, decode in ((1e6, 100.0), (3e6, 300.0), (2e6, 900.0)):
        samples.runs["ours", one].append({"prefill": prefill, "decode": decode, "kv": "bf16", "kv_bytes": 1})
    samples.runs["ours", many].append({"prefill": 1.0, "decode": 1e6, "kv": "bf16", "kv_bytes": 4})
    samples.runs["ours", sparse].append({"prefill": 1.0, "decode": 1.0, "kv": "bf16", "kv_bytes": 1, "bytes_read": 77})
    samples.runs["slow", one].append({"prefill": 1e5, "decode": 600.0, "kv": "f16"})
    assert report.step_bytes(shape, samples, sparse, options) == 5077
    prefill, blank, decode, batch, _ = report.rows(shape, samples, [one, many, unmeasured], ["slow"], options, FixedCeilings())
    assert (prefill["ours"], prefill["ratio"], prefill["kv"]) == (2e6, 20.0, "bf16")
    assert prefill["bound"] == 3e12 / (2000 + 4 * 2 * 16 * 11 / 2) and prefill["of_bound"] == 2e6 / prefill["bound"]
    assert (decode["ours"], decode["ratio"]) == (300.0, 0.5)
    assert decode["bound"] == 25e9 / (5000 + 12 * 64)  # steps see 11, 12 and 13 tokens of 64 bytes
    assert batch["bound"] == 4 * 25e9 / (5000 + 4 * 12 * 64) and batch["peers"] == {"slow": None} and batch["ratio"] is None
    assert (blank["ours"], blank["kv"], blank["of_bound"], blank["runs"]) == (None, None, None, {"ours": [], "slow": []})
    text = report.table([prefill, decode, batch, blank], {"slow": "f16"})
    assert [len(line) for line in text.splitlines()] == [len(text.splitlines()[0])] * 5 and "20.00x" in text and "decode x4" in text


def test_without_ceilings_there_are_no_bounds() -> None:
    samples = Samples()
    samples.runs["ours", Point(8)].append({"prefill": 1.0, "decode": 1.0, "kv": "f32", "kv_bytes": 1})
    found = report.rows(bounds.Shape(1, 1, 1, 1, 1, 1, "f32"), samples, [Point(8)], [], Options(2, 1), None)
    assert [(row["ours"], row["bound"], row["of_bound"]) for row in found] == [(1.0, None, None)] * 2


def test_ceilings_are_plausible() -> None:
    program = ceilings.find()
    assert program is not None
    assert 1e8 < ceilings.read(program, 1 << 20, 1) < 1e13
    assert 1e8 < ceilings.multiply(program, "reference", 1) < 1e13
    with pytest.raises(MeasureError, match="abacus is no level"):
        ceilings.multiply(program, "abacus", 1)


def test_prompts_do_not_begin_alike(path) -> None:
    with hs.load(path, threads=1, ram="1MiB") as model:
        ids = job.prompt(model, 200, None)
    made = job.make("m", ids, Point(150, 3), Options(2, 1))
    beginnings = [tuple(prompt[:16]) for prompt in (*made["prompts"], made["warm_up"])]
    assert len(set(beginnings)) == 4 and [len(prompt) for prompt in made["prompts"]] == [150] * 3 and len(made["warm_up"]) == 150
    assert len(job.make("m", job.np.resize(ids, 5001), Point(5000), Options(2, 1))["warm_up"]) == 2048


# ---- rounds -----------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes only when something is measured."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(rounds.time, "monotonic", lambda: self.now)


def go(clock, seconds, *, depths=(512, 2048, 8192), repeats=1, one=None, everything=None, names=("ours", "peer")):
    """Rounds with programs that take seconds(name, depth). Returns the turns that were begun, and the samples."""
    turns: list[tuple[str, int]] = []

    def measure(program, point, limit):
        turns.append((program.name, point.depth))
        need = seconds(program.name, point.depth)
        clock.now += min(need, limit if limit is not None else math.inf)
        if limit is not None and need > limit:
            raise LimitError(f"took more than {limit:.0f} s")
        return {"prefill": 1.0, "decode": 1.0, "kv": "x"}

    programs_ = [Program(name, [], "") for name in names]
    rounds_ = Rounds(programs_, [Point(depth) for depth in depths], repeats, Limits(one, everything), measure, lambda text: None,
                     lambda point, samples: None)
    return turns, rounds_.run()


def test_programs_take_turns(monkeypatch) -> None:
    turns, samples = go(Clock(monkeypatch), lambda name, depth: 1, depths=(1, 2), repeats=2)
    assert turns == [("ours", 1), ("peer", 1), ("ours", 2), ("peer", 2), ("peer", 1), ("ours", 1), ("peer", 2), ("ours", 2)]
    assert samples.skipped == [] and all(len(runs) == 2 for runs in samples.runs.values())


def test_what_would_take_too_long_is_not_begun(monkeypatch) -> None:
    """2 seconds to start and 1 for each 512 tokens: 2048 tokens take 6, 8192 take 18, known to be 15 or more."""
    turns, samples = go(Clock(monkeypatch), lambda name, depth: 2 + depth / 512, one=10, names=("ours",))
    assert turns == [("ours", 512), ("ours", 2048)]
    assert samples.skipped == [{"program": "ours", "depth": 8192, "batch": 1,
                                "reason": "it would take 15 s or more, and --limit leaves 10 s"}]


def test_what_took_too_long_is_not_tried_deeper(monkeypatch) -> None:
    turns, samples = go(Clock(monkeypatch), lambda name, depth: 100 if name == "peer" else 1, one=10, repeats=2)
    assert [turn for turn in turns if turn[0] == "peer"] == [("peer", 512)] and len(samples.skipped) == 3
    assert len(samples.runs["ours", Point(8192)]) == 2


def test_the_budget_ends_it(monkeypatch) -> None:
    turns, samples = go(Clock(monkeypatch), lambda name, depth: 10, everything=25, repeats=3)
    assert turns == [("ours", 512), ("peer", 512)]  # a third would take 10 seconds of the 5 that are left
    assert samples.skipped[0]["reason"] == "it would take 10 s or more, and --budget leaves 5 s"
    _, samples = go(Clock(monkeypatch), lambda name, depth: 10, everything=20, repeats=3)
    assert samples.skipped[0]["reason"] == "the time of --budget is over"


def test_ours_alone_must_work() -> None:
    def measure(program, point, limit):
        raise MeasureError("no memory")

    with pytest.raises(MeasureError, match="no memory"):
        Rounds([Program("ours", [], "")], [Point(8)], 1, Limits(), measure, lambda text: None, lambda point, samples: None).run()


def test_the_weights_of_peers_are_named(tmp_path) -> None:
    tiny.write_gguf(tmp_path / "m.gguf", tiny.config(), tiny.weights(tiny.config()))
    facts = programs.model_facts(str(tmp_path / "m.gguf"))
    assert facts["types"]["F32"] > 4 * 2 * LAYER_WEIGHTS


def test_a_process_that_answers_nonsense() -> None:
    for code, text in (("print('[1')", "exit code 0"), ("import os; os.kill(os.getpid(), 9)", "ended by signal 9"),
                       ("print('{}'); raise ValueError('bad weights')", r"ValueError: bad weights \(exit code 1\)")):
        with pytest.raises(MeasureError, match=text):
            Program("x", [sys.executable, "-c", code], "").measure({}, 30)
    with pytest.raises(LimitError, match="took more than 1 s"):
        Program("x", ["/bin/sh", "-c", "sleep 77; true"], "").measure({}, 1)
    end = time.monotonic() + 20
    while _running(b"sleep\x0077\0"):  # it, too, was told to end
        assert time.monotonic() < end
        time.sleep(0.05)
    with pytest.raises(hs.FileError, match="cannot run"):
        Program("x", ["/no/such/program"], "").measure({}, 30)
    assert programs.ours("m").facts == {"version": f"hisparse_rt {hs.__version__}"}


def _running(command: bytes) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended since
            if path.read_bytes() == command:
                return True
    return False


# ---- the picture ------------------------------------------------------------------------------------------------


def test_the_picture(path, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    from hisparse_rt.bench import plot

    done = run("bench", path, "--depths", "16,32", "--repeats", 1, "--decode-tokens", 2, "--plot", tmp_path / "a.svg", "--json",
               tmp_path / "a.json")
    assert done.returncode == 0, done.stderr
    assert plot.main([str(tmp_path / "a.json"), str(tmp_path / "b.svg")]) == 0
    first, second = (tmp_path / "a.svg").read_bytes(), (tmp_path / "b.svg").read_bytes()
    assert first == second and b"<svg" in first
    written = json.loads((tmp_path / "a.json").read_text())
    written["rows"][0]["ours"] = None  # gaps are left out of the lines
    written["peers"] = {"openvino": {"kv": "u8"}}
    for row in written["rows"]:
        row["peers"] = {"openvino": 3.0}
    with open(tmp_path / "c.png", "wb") as file:
        plot.draw(written, "c.png", file)
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib(monkeypatch) -> None:
    from hisparse_rt import picture

    monkeypatch.setattr(picture.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"hisparse_rt\[bench\]"):
        picture.check("x.svg")
