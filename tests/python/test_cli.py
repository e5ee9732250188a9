# SPDX-License-Identifier: Apache-2.0
"""The command line, as a person uses it: output, exit codes, one-line errors."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import hisparse_rt as hs
import numpy as np
import pytest
import tiny
from hisparse_rt.commands.inspect import largest_context, planner
from shell import command, fails, run

pytestmark = pytest.mark.python

TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
COMMANDS = ["convert", "generate", "chat", "logits", "inspect", "bench"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    cfg = tiny.config(max_position_embeddings=4096, eos_token_id=tiny.NULL)
    return tiny.write_hf(tmp_path_factory.mktemp("source"), cfg, tiny.weights(cfg), chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def path(folder, tmp_path_factory):
    """A converted model, made by the command itself."""
    path = tmp_path_factory.mktemp("model") / "tiny.hsr"
    done = run("convert", folder, path, "--dtype", "f32")
    assert done.returncode == 0 and "llama f32" in done.stdout, done.stderr
    return path


# ---- help and usage ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name) -> None:
    done = run(name, "--help")
    assert done.returncode == 0 and "usage: hisparse-rt " + name in done.stdout and done.stderr == ""


def test_help_names_every_command() -> None:
    done = run("--help")
    assert done.returncode == 0 and all(name in done.stdout for name in COMMANDS)
    assert run("--version").stdout.strip() == f"hisparse-rt {hs.__version__}"


def test_wrong_usage(path) -> None:
    fails(code=2)
    fails("dance", code=2, text="dance")
    fails("generate", code=2, text="MODEL")
    fails("generate", path, "-p", "x", "--ram", "lots", code=2, text="4GiB")
    fails("generate", path, "-p", "x", "--kv", "f8", code=2, text="f8")
    fails("generate", path, "-p", "x", "--raw", "--system", "s", code=2, text="--system")


# ---- generate ---------------------------------------------------------------------------------------------------


def test_generate(path) -> None:
    done = run("generate", path, "-p", "hello", "--max-tokens", 12)
    with hs.load(path, threads=1, ram="16MiB") as model:
        assert done.stdout == model.chat("hello", max_tokens=12) + "\n"
        raw = hs.generate(model, "hello", max_tokens=12)
    assert re.fullmatch(
        r"prompt \d+ tokens, generated 12 \(length\), prefill [\d.]+ tok/s, decode [\d.]+ tok/s, KV [\d.]+ \w+\n", done.stderr
    )  # fmt: skip
    assert run("generate", path, "-p", "hello", "--max-tokens", 12, "--raw").stdout == raw + "\n"
    assert run("generate", path, "--max-tokens", 12, "--raw", input="hello", stdin=None).stdout == raw + "\n"


def test_doing_without_a_calibration_is_said_once(path) -> None:
    done = run("generate", path, "-p", "hello", "--max-tokens", 2, "--profile", "balanced", "--no-calibrate")
    said, _summary = done.stderr.splitlines()
    assert said.startswith("hisparse-rt: no calibration of the model was loaded: selector auto is minmax without virtual tokens")
    assert len(run("generate", path, "-p", "hello", "--max-tokens", 2).stderr.splitlines()) == 1, "nothing to say of dense attention"


def test_generate_json(path) -> None:
    arguments = ("generate", path, "-p", "hello", "--max-tokens", 6, "--json", "--temperature", 1.5, "--threads", 1, "--isa", "reference")
    first = json.loads(run(*arguments, "--seed", 3).stdout)
    assert first == json.loads(run(*arguments, "--seed", 3).stdout) | {
        key: first[key] for key in ("prefill_tokens_per_second", "decode_tokens_per_second")
    }
    assert (first["seed"], first["threads"], first["isa"], first["dtype"], len(first["tokens"])) == (3, 1, "reference", "f32", 6)
    free = json.loads(run(*arguments).stdout)
    assert json.loads(run(*arguments, "--seed", free["seed"]).stdout)["text"] == free["text"]


def test_generate_fails_in_one_line(path, tmp_path) -> None:
    fails("generate", tmp_path / "no.hsr", "-p", "x", text="no.hsr")
    (tmp_path / "junk.hsr").write_bytes(b"junk")
    fails("generate", tmp_path / "junk.hsr", "-p", "x", text="junk.hsr")
    fails("generate", path, "-p", "x " * 5000, text=r"\d{4,}.*4096")
    fails("generate", path, "-p", "x", "--context", "5000", text="5000")
    fails("generate", path, "-p", "", "--raw", text="empty prompt")
    assert run("generate", path, "-p", "x", "--context", "5000", "--beyond-trained", "--max-tokens", "1").returncode == 0


def test_no_template_is_explained(tmp_path, tmp_path_factory) -> None:
    tiny.write_hf(tmp_path / "plain")
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    fails("generate", tmp_path / "plain", "-p", "x", text="no chat template", env=environment)
    done = run("generate", tmp_path / "plain", "-p", "x", "--raw", "--max-tokens", 2, env=environment)
    assert done.returncode == 0 and len(list((tmp_path / "cache" / "hisparse_rt").iterdir())) == 1


def test_a_reader_that_leaves(path) -> None:
    process = subprocess.Popen(command("generate", path, "-p", "x", "--max-tokens", 4000), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(1)
    process.stdout.close()
    assert (process.wait(60), process.stderr.read()) == (1, b"")
    process.stderr.close()


def test_a_terminal_that_cannot_show_everything(path) -> None:
    done = run("generate", path, "-p", "x", "--max-tokens", 40, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and done.stdout.isascii()


def test_closed_output_is_no_reason_to_fail(path) -> None:
    done = subprocess.run(
        command("generate", path, "-p", "x", "--max-tokens", 2), preexec_fn=lambda: [os.close(fd) for fd in (0, 1, 2)], timeout=60
    )
    assert done.returncode == 0


def test_ctrl_c_ends_quietly(path) -> None:
    process = subprocess.Popen(command("generate", path, "-p", "x", "--max-tokens", 4000), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, b"")


# ---- chat -------------------------------------------------------------------------------------------------------


def test_chat_from_a_file(path, tmp_path) -> None:
    transcript = tmp_path / "talk.json"
    lines = f"hello\n/stats\n/save {transcript}\n/dance\n/save\n\n/help\n/reset\nagain\n/exit\nnever\n"
    done = run("chat", path, "--max-tokens", 5, "--system", "brief", input=lines, stdin=None)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    with hs.load(path, threads=1, ram="16MiB") as model:
        answers = [model.chat(text, system="brief", max_tokens=5) for text in ("hello", "again")]
    assert done.stdout == "".join(answer + "\n" for answer in answers)
    saved = json.loads(transcript.read_text())["messages"]
    assert [message["content"] for message in saved] == ["brief", "hello", answers[0]]
    assert transcript.stat().st_mode & 0o77 == 0
    for text in ("context ", "prefill", "unknown command /dance", "needs a file name", "/reset"):
        assert text in done.stderr
    assert run("chat", path, input="hello", stdin=None).returncode == 0


def test_a_failing_turn_does_not_end_the_chat(path) -> None:
    done = run("chat", path, "--max-tokens", 3, "--context", "64", input=f"{'x ' * 100}\nhi\n/stats\n/save /no/such/folder/x\n", stdin=None)
    assert done.returncode == 0 and done.stdout.count("\n") == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2 and "64" in errors[0] and "/no/such" in errors[1]
    assert done.stderr.count("/reset starts again") == 1


def test_a_chat_that_cannot_be_is_refused_at_once(path) -> None:
    fails("chat", path, "--context", "5000", text="a context of 5000 tokens", input="hi\n", stdin=None)


def test_stats_after_a_reset_are_not_those_before(path) -> None:
    done = run("chat", path, "--max-tokens", 2, input="hi\n/reset\n/stats\n", stdin=None)
    assert done.returncode == 0 and "nothing was said yet" in done.stderr and "prefill" not in done.stderr


def test_ctrl_c_stops_the_answer_not_the_chat(path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, command("chat", path, "--max-tokens", 4000, "--isa", "reference"), os.environ | {"TERM": "dumb"})

    seen = ""

    def read_past(text: str, press: bytes = b"") -> None:
        """Press a key, again if nothing happens: Python forgets a Ctrl-C that comes just before it waits for a key."""
        nonlocal seen
        os.write(terminal, press)
        deadline = time.monotonic() + 60
        while text not in seen:
            assert time.monotonic() < deadline, seen
            if select.select([terminal], [], [], 1)[0]:
                seen += os.read(terminal, 4096).decode("utf-8", "replace")
            else:
                os.write(terminal, press)
        seen = seen.partition(text)[2]

    try:
        read_past("> ")
        os.write(terminal, b"hello\r")
        read_past("hello\r\n")
        while not seen:  # the answer has begun
            seen += os.read(terminal, 4096).decode("utf-8", "replace")
        os.write(terminal, b"\x03")
        read_past("(stopped)")
        read_past("> ")
        os.write(terminal, b"/stats\r")
        read_past("context ")
        read_past("> ")
        read_past("/exit leaves", press=b"\x03")
        read_past("> ")
        os.write(terminal, b"/exit\r")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        os.close(terminal)


# ---- logits -----------------------------------------------------------------------------------------------------


def test_logits(path, tmp_path) -> None:
    ids = [5, 9, 200, 7, 7, 319, 42]
    (tmp_path / "ids.json").write_text(json.dumps(ids))
    for chunk in (512, 3):
        done = run("logits", path, "--ids", tmp_path / "ids.json", "--out", tmp_path / "out.f32", "--chunk", chunk)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        with hs.load(path, ram="16MiB") as model:
            assert np.fromfile(tmp_path / "out.f32", "<f4").tobytes() == model.logits(ids).tobytes()
    assert sorted(os.listdir(tmp_path)) == ["ids.json", "out.f32"]


def test_logits_to_standard_output(path, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ids.json").write_text("[5, 9, 200]")
    done = subprocess.run(command("logits", path, "--ids", "ids.json", "--out", "-"), capture_output=True, timeout=600)
    with hs.load(path, ram="16MiB") as model:
        assert done.stdout == model.logits([5, 9, 200]).tobytes()
    assert done.returncode == 0 and b"-: 3 rows" in done.stderr and os.listdir(tmp_path) == ["ids.json"]
    screen, ours = pty.openpty()
    done = subprocess.run(command("logits", path, "--ids", "ids.json", "--out", "-"), stdout=ours, stderr=subprocess.PIPE, text=True,
                          timeout=600)
    os.close(ours)
    os.close(screen)
    assert done.returncode == 1 and "not for a terminal" in done.stderr


@pytest.mark.parametrize("arguments", [
    ("bench", "MODEL", "--depths", "8", "--save", "-"), ("bench", "MODEL", "--depths", "8", "--save", "-", "--json", "-"),
    ("calibrate", "MODEL", "--out", "-"), ("convert", "MODEL", "-"), ("generate", "MODEL", "-p", "x", "--prompt-cache", "-"),
])
def test_what_is_written_to_files_only(path, tmp_path, monkeypatch, arguments) -> None:
    """- means standard output wherever it means anything: nobody gets a file of that name."""
    monkeypatch.chdir(tmp_path)
    fails(*(path if argument == "MODEL" else argument for argument in arguments), text="- is standard output.*files only")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "text"),
    [("[", "JSON"), ("{}", "list"), ("[]", "no token ids"), ("[1.5]", "1.5"), ("[true]", "bool"), ("[9999]", "9999"), ("[-1]", "-1"),
     (json.dumps([1] * 5000), "5000")],
)  # fmt: skip
def test_logits_refuses(path, tmp_path, content, text) -> None:
    (tmp_path / "ids.json").write_text(content)
    fails("logits", path, "--ids", tmp_path / "ids.json", "--out", tmp_path / "out.f32", text=text)
    fails("logits", path, "--ids", tmp_path / "none.json", "--out", tmp_path / "out.f32", text="none.json")
    assert os.listdir(tmp_path) == ["ids.json"]


def test_logits_to_a_folder_that_is_not_there(path, tmp_path) -> None:
    (tmp_path / "ids.json").write_text("[1]")
    fails("logits", path, "--ids", tmp_path / "ids.json", "--out", tmp_path / "no" / "out.f32", text="no folder .*no$")


# ---- inspect ----------------------------------------------------------------------------------------------------


def test_inspect(path) -> None:
    facts = json.loads(run("inspect", path, "--json", "--ram", "64MiB", "--isa", "reference", "--threads", 1).stdout)
    shape = [facts[key] for key in ("arch", "layers", "kv_heads", "vocab_size", "weight_dtype")]
    assert shape == ["llama", 2, 2, tiny.VOCAB, "f32"]
    assert facts["kv_format"] == "f32" and facts["kv_bytes_per_token"] == 12288 // 64 * 2 * 2  # slots of 12 KiB
    assert sum(facts["weight_bytes_by_dtype"].values()) == facts["weight_bytes"]
    assert facts["kv_budget_bytes"] == 64 << 20 and (facts["isa"], facts["threads"]) == ("reference", 1)
    assert facts["tokenizer"]["tokens"] == tiny.VOCAB and facts["tokenizer"]["chat_template"] is True
    assert facts["source"].startswith("sha256:")
    table = run("inspect", path).stdout
    for text in ("llama", "trained context", "4,096 tokens", "chat template: yes", "f32"):
        assert text in table


@pytest.mark.parametrize(("kv", "ram"), [("f32", "2MiB"), ("bf16", "2MiB"), ("int8", "5MiB")])
@pytest.mark.parametrize("cold_size", [None, "16MiB"])
def test_the_largest_context_is_the_largest(path, tmp_path, kv, ram, cold_size) -> None:
    """What inspect promises for a budget is admitted, one page more is not."""
    cold = {} if cold_size is None else {"cold": tmp_path, "cold_size": cold_size}
    with hs.load(path, threads=1, ram="8MiB" if cold else ram, **cold) as model:
        n = largest_context(planner(model, kv=kv, profile="exact", **cold))
        with model.session(kv=kv, context=n + 1000, beyond_trained=True) as session:
            session.append([5] * n)
        with model.session(kv=kv, context=n + 1000, beyond_trained=True) as session, pytest.raises(hs.NoSpaceError):
            session.append([5] * (n + 64))


def test_inspect_of_a_folder_converts_and_no_more(tmp_path) -> None:
    cfg = tiny.config(max_position_embeddings=4096)
    tiny.write_hf(tmp_path / "hf", cfg, tiny.weights(cfg))
    done = run("inspect", tmp_path / "hf", env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert done.returncode == 0 and [file.suffix for file in (tmp_path / "cache" / "hisparse_rt").iterdir()] == [".hsr"]


def test_inspect_counts_the_format_that_is_asked_for(path) -> None:
    """A denser format takes less of a token and holds more of them."""
    found = {kv: json.loads(run("inspect", path, "--json", "--ram", "64MiB", "--kv", kv).stdout) for kv in ("f32", "bf16", "int8")}
    assert [facts["kv_format"] for facts in found.values()] == list(found)
    assert found["f32"]["kv_bytes_per_token"] > found["bf16"]["kv_bytes_per_token"] >= found["int8"]["kv_bytes_per_token"]
    assert found["f32"]["largest_context"] < found["bf16"]["largest_context"]


# ---- convert, and what the package tells C programs -------------------------------------------------------------


def test_convert_fails_in_one_line(tmp_path) -> None:
    done = run("convert", tmp_path / "no", tmp_path / "x.hsr")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and not (tmp_path / "x.hsr").exists()


def test_the_config_tool() -> None:
    def config(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "-m", "hisparse_rt", *arguments], capture_output=True, text=True, timeout=60)

    package = Path(hs.__file__).resolve().parent
    assert config("--version").stdout.strip() == hs.__version__
    assert config("--cflags").stdout.strip() == f"-I{package / 'include'}"
    both = config("--cflags", "--libs").stdout.split()
    assert both == [f"-I{package / 'include'}", f"-L{package / '_native'}", "-lhisparse_rt", f"-Wl,-rpath,{package / '_native'}"]
    assert config("--pkgconfigdir").stdout.strip() == str(package / "_native" / "pkgconfig")
    for arguments in ((), ("generate", "model.hsr")):
        done = config(*arguments)
        assert done.returncode == 2 and "the command line is hisparse-rt" in done.stderr
