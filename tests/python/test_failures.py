# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in the hands of users: wrong files, odd words, silly numbers, full disks, other threads. Each fault ends in one
clear error or does no harm, and whatever ran beside it goes on."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from unittest import mock

import hisparse_rt as hs
import numpy as np
import pytest
import tiny
from hisparse_rt._library import ffi, lib
from hisparse_rt.cli import main
from hisparse_rt.tools.convert import ConvertError, convert
from safetensors.numpy import load_file
from shell import command, fails, run
from tokenizers import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
TOKENIZER = Tokenizer.from_str(tiny.tokenizer_json())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    cfg = tiny.config(max_position_embeddings=512, eos_token_id=tiny.NULL)
    return tiny.write_hf(tmp_path_factory.mktemp("source"), cfg, tiny.weights(cfg), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def path(folder, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.hsr"
    convert(folder, path, "f32")
    return path


@pytest.fixture(scope="module")
def model(path):
    with hs.load(path, ram="32MiB", threads=2) as model:
        yield model


def reciting(folder: Path, ids: list[int], **files) -> Path:
    """A converted model that says ids[1:] after ids[0]."""
    tiny.script_model(folder, dict(itertools.pairwise(ids)), **files)
    convert(folder, folder / "model.hsr", "f32")
    return folder / "model.hsr"


@pytest.fixture
def refuses(capsys):
    """What `fails` checks, without a process of its own."""

    def check(*arguments, code: int = 1, text: str = "") -> str:
        try:
            done = main([os.fsdecode(argument if isinstance(argument, (bytes, os.PathLike)) else str(argument)) for argument in arguments])
        except SystemExit as error:
            done = error.code
        out, err = capsys.readouterr()
        lines = err.strip().splitlines()
        assert (done, out) == (code, "") and lines[-1].startswith("hisparse-rt") and re.search(text, lines[-1]), (arguments, done, out, err)
        assert code == 2 or len(lines) == 1
        return lines[-1]

    return check


def one(text: str) -> int:
    (token,) = TOKENIZER.encode(text, add_special_tokens=False).ids
    return token


# ---- files that are no model, or a broken one -------------------------------------------------------------------


def damaged(path: Path, out: Path, fault: str) -> Path:
    """A copy of a model file with one fault. Replacements keep all lengths."""
    data = path.read_bytes()
    version = data.index(b"hisparse.format_version") + len(b"hisparse.format_version") + 4
    faults = {
        "half": lambda: data[: len(data) // 2],
        "minus one byte": lambda: data[:-1],
        "only the header's start": lambda: data[:700],
        "another version": lambda: data[:version] + b"\x02" + data[version + 1 :],
        "a tensor by another name": lambda: data.replace(b"output_norm.weight", b"output_morn.weight"),
        "a layer that is not there": lambda: data.replace(b"blk.1.attn_norm.weight", b"blk.9.attn_norm.weight"),
        "another architecture": lambda: data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0blama"),
        "no tokenizer in its place": lambda: data.replace(b'{"version"', b'["version"'),
        "a template that does not parse": lambda: data.replace(b"{% for m", b"{{ for m"),
        "special tokens that are no JSON": lambda: data.replace(b"\x02\0\0\0\0\0\0\0{}", b"\x02\0\0\0\0\0\0\0{;"),
        "weights that are not numbers": lambda: data[:-8192] + b"\xff" * 8192,
    }
    out.write_bytes(faults[fault]())
    assert out.read_bytes() != data
    return out


@pytest.mark.python
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("half", "x.hsr: tensor .* does not fit the file"),
        ("minus one byte", "x.hsr: tensor .* does not fit the file"),
        ("only the header's start", "x.hsr: .* cut short"),
        ("another version", "x.hsr: format version 2, .* convert the model again"),
        ("a tensor by another name", "x.hsr: tensor 'output_norm.weight' is missing"),
        ("a layer that is not there", "x.hsr: tensor 'blk.1.attn_norm.weight' is missing"),
        ("another architecture", "x.hsr: architecture 'blama'"),
        ("no tokenizer in its place", "tokenizer does not load"),
        ("a template that does not parse", "chat template is not usable"),
        ("special tokens that are no JSON", "x.hsr: hisparse.special_tokens is not valid JSON"),
        ("weights that are not numbers", "not finite"),
    ],
)
def test_a_damaged_model_file(refuses, path, tmp_path, fault, text) -> None:
    """A message that names what is wrong, from the first command a user tries and from the interactive one."""
    refuses("generate", damaged(path, tmp_path / "x.hsr", fault), "-p", "hi", "--max-tokens", 2, text=text)
    if "not finite" not in text:
        done = run("chat", tmp_path / "x.hsr", input="", stdin=None)
        assert done.returncode == 1 and re.search(text, done.stderr) and done.stderr.count("\n") == 1


@pytest.mark.python
def test_bytes_after_the_end_are_ignored(path, tmp_path) -> None:
    (tmp_path / "x.hsr").write_bytes(path.read_bytes() + b"x" * 5000)
    assert run("generate", tmp_path / "x.hsr", "-p", "hi", "--max-tokens", 2).returncode == 0


@pytest.mark.python
def test_things_that_are_no_model_file(refuses, path, folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "empty.hsr").touch()
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe.hsr")
    tiny.write_gguf(tmp_path / "model.bin")
    (tmp_path / "other.gguf").write_bytes(path.read_bytes())
    for name, text in {
        tmp_path / "empty.hsr": "the file is empty",
        tmp_path / "text.gguf": "not a GGUF file",
        tmp_path / "folder": "config.json",
        tmp_path / "pipe.hsr": "not a regular file",
        tmp_path / "model.bin": "hisparse-rt convert",
        tmp_path / "other.gguf": "already converted",
        tmp_path / "none.gguf": "no such file",
        folder / "model.safetensors": "does not start with GGUF",
        "": "the path is empty",
    }.items():  # fmt: skip
        refuses("generate", name, "-p", "hi", text=text)


@pytest.mark.python
def test_a_path_whose_bytes_are_no_text(refuses, path, tmp_path) -> None:
    name = os.fsencode(tmp_path) + b"/\xff \xe6\xa8\xa1.hsr"
    Path(os.fsdecode(name)).write_bytes(path.read_bytes())
    assert json.loads(run("inspect", name, "--json").stdout)["weight_bytes_by_dtype"]
    Path(os.fsdecode(name)).write_bytes(b"junk")
    refuses("generate", name, "-p", "x", text="does not start with GGUF")


# ---- words that are no text, or nothing -------------------------------------------------------------------------


@pytest.mark.python
@pytest.mark.parametrize("raw", [(), ("--raw",)])
def test_odd_prompts(path, refuses, raw) -> None:
    def ok(*arguments, **options) -> None:
        done = run("generate", path, "--max-tokens", 2, *raw, *arguments, **options)
        assert done.returncode == 0 and "Traceback" not in done.stderr

    for prompt in (" ", tiny.BOS + tiny.EOS, "👨‍👩‍👧e\u030a\u202e", "-5"):
        ok("-p", prompt)
    ok(input="a\0b", stdin=None)
    fails("generate", path, *raw, input="x " * 100_000, stdin=None, text=r"\d{6} tokens.*512")
    refuses("generate", path, "-p", b"a\xff", *raw, text="not valid Unicode: it holds the byte 0xFF")
    refuses("generate", path, "-p", b"\xed\xa0\x80", *raw, text="not valid Unicode")
    if raw:
        refuses("generate", path, "-p", "", *raw, text="empty prompt.*no begin token")


@pytest.mark.python
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_input_that_is_no_utf_8(path, tmp_path, errors) -> None:
    (tmp_path / "in").write_bytes(b"hi\nw\xff\xfe\nyo\n")
    environment = os.environ | {"PYTHONIOENCODING": f"utf-8:{errors}"}
    with open(tmp_path / "in") as file:
        fails("generate", path, stdin=file, env=environment, text="byte 0xFF")
    with open(tmp_path / "in") as file:
        done = run("chat", path, "--max-tokens", 2, stdin=file, env=environment)
    assert done.returncode == 0 and "error: the text is not valid Unicode: it holds the byte 0xFF" in done.stderr
    assert done.stderr.count("\n") == 2 and done.stdout.count("\n") == 2  # the other two turns were answered


@pytest.mark.python
def test_no_input_at_all(path) -> None:
    done = subprocess.run(command("generate", path), preexec_fn=lambda: os.close(0), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no prompt" in done.stderr and "Traceback" not in done.stderr


# ---- silly numbers ----------------------------------------------------------------------------------------------


@pytest.mark.python
@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--max-tokens", ["-1", "1e3", "3000000000", "x", ""]), ("--temperature", ["-1", "nan", "inf", "hot"]),
        ("--top-k", ["-1", "99999999999", "1.5"]), ("--top-p", ["0", "1.1", "nan", "-0.1"]), ("--min-p", ["-1", "2", "nan"]),
        ("--repetition-penalty", ["0", "-1", "nan"]), ("--seed", ["-1", "18446744073709551616"]), ("--stop", [""]),
        ("--context", ["0", "-5", "99999999999"]), ("--threads", ["-1", "1025", "x"]), ("--ram", ["0", "1", "-1", "1e9", "lots"]),
        ("--isa", ["sse"]), ("--kv", ["q8"]),
    ],
)  # fmt: skip
def test_a_silly_option_is_wrong_usage(refuses, option, values) -> None:
    """Told before the model is opened, or converted."""
    for value in values:
        text = refuses("generate", "no-such-model", "-p", "x", f"{option}={value}", code=2)
        assert f"argument {option}: " in text


@pytest.mark.python
def test_silly_options_of_the_other_commands(refuses, path, tmp_path) -> None:
    (tmp_path / "ids.json").write_text("[1]")
    logits = ("logits", path, "--ids", tmp_path / "ids.json", "--out", tmp_path / "out")
    for chunk in ("0", "-1", "5000", "x"):
        refuses(*logits, f"--chunk={chunk}", code=2, text="--chunk")
        refuses("bench", path, f"--chunk={chunk}", code=2, text="--chunk")
    refuses(*logits, "--context", "0", code=2, text="--context")
    for option in ("--depths=-4", "--depths=", "--depths=,", "--depths=99999999999", "--decode-tokens=1", "--repeats=0"):
        refuses("bench", path, option, code=2, text=option.partition("=")[0])
    refuses("bench", path, "--depths", "500", text="500.*512.*--beyond-trained")
    refuses("convert", path, tmp_path / "x", "--dtype", "f31", code=2, text="f31")


@pytest.mark.python
def test_help_tells_the_truth(path) -> None:
    help_text = " ".join(run("generate", "--help").stdout.split())
    report = json.loads(run("generate", path, "-p", "x", "--json").stdout)
    assert "tokens to generate at most (default: 256)" in help_text and len(report["tokens"]) == 256
    assert "0 takes the most likely token (default: 0.0)" in help_text
    assert report["text"] == json.loads(run("generate", path, "-p", "x", "--json", "--temperature=0").stdout)["text"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stop": 5}, "stop must be"), ({"stop": [None]}, "stop must be"), ({"stop_tokens": 5}, "token ids must be a list"),
        ({"logit_bias": "abc"}, "logit_bias must map"), ({"logit_bias": {5, 6}}, "logit_bias must map"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"), ({"logit_bias": {5: None}}, "logit_bias.5."),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False"), ({"temperature": None}, "temperature"),
        ({"context": "5"}, "context"), ({"context": True}, "context"), ({"seed": "a"}, "seed"),
    ],
)  # fmt: skip
def test_options_of_the_wrong_kind_are_named(model, options, text) -> None:
    with pytest.raises(TypeError, match=text):
        hs.generate(model, "x", **options)


def test_numbers_beyond_every_range_are_named(model) -> None:
    for options, text in (
        ({"temperature": 10**400}, "temperature is too large"), ({"context": 1 << 40}, "context is 1099511627776"),
        ({"context": -5}, "context is -5"), ({"max_tokens": 1 << 40}, "max_tokens is 1099511627776, allowed are 0 to"),
        ({"stop": "\ud800"}, "half a character"), ({"stop_tokens": [99999]}, "99999"), ({"logit_bias": {5: math.inf}}, "inf"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            hs.generate(model, "x", **options)
    with pytest.raises(hs.TokenError, match="99999"):
        model.decode([5, 99999])


def test_options_of_load_are_checked_before_a_conversion(folder, tmp_path) -> None:
    for options, text in (
        ({"threads": -1}, "threads"), ({"isa": "sse"}, "sse"), ({"kv": "q8"}, "q8"), ({"ram": 5}, "5 bytes"), ({"dtype": "f16"}, "f16"),
        ({"log": "x"}, "log must be"),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=text):
            hs.load(folder, cache_dir=tmp_path / "cache", **options)
    assert not (tmp_path / "cache").exists()
    (tmp_path / "file").touch()
    with pytest.raises(hs.FileError, match="file.*for converted models"):
        hs.load(folder, cache_dir=tmp_path / "file")


def test_the_highest_seed_fills_a_long_context(path) -> None:
    """It is filled in parts, each with a seed of its own."""
    with hs.load(path, ram="64MiB", threads=1) as model, model.session(context=40000, beyond_trained=True) as session:
        session.logits([5] * 20)
        session.fill(33000, seed=(1 << 64) - 1)
        assert session.n_tokens == 33020


def test_numbers_about_pages_and_disks_are_named(model, path) -> None:
    for seconds in (math.nan, 1e300, -1, 0):
        with pytest.raises(ValueError, match="io_deadline is .* seconds, allowed are 0.001 to"):
            hs.load(path, io_deadline=seconds)
    with pytest.raises(TypeError, match="sketch must be two numbers"):
        model.session(sketch=5)
    with model.session() as session:
        session.logits([5] * 20)
        for arguments, text in (((0, 21), "first is 21, allowed are 0 to 20"), ((0, 5, 1 << 31), "n is .* 0 to 15"), ((9,), "layer is 9")):
            with pytest.raises(ValueError, match=text):
                session.keys(*arguments)
        for options in ({"n": 0}, {"n": 1, "seed": -1}, {"n": 1, "seed": 1 << 64}):
            with pytest.raises(ValueError, match=list(options)[-1]):
                session.fill(**options)
        for options in ({"n": -1}, {"n": 1 << 40}, {"n": 4, "stride": 0}, {"n": 4, "first": -3}, {"n": 4, "layers": range(2, 9)},
                        {"n": 4, "slices": -1}):
            with pytest.raises(ValueError, match=list(options)[-1]), session.capture(**options):
                pass
        for layers in (range(0, 2, 2), range(1, -1, -1), [0, 1], 1):  # a step would be written past the end of what is recorded
            with pytest.raises(TypeError, match="range of step 1"), session.capture(4, layers=layers):
                pass


# ---- the places output goes to ----------------------------------------------------------------------------------


@pytest.mark.python
def test_outputs_never_replace_what_they_must_not(refuses, path, tmp_path) -> None:
    """A pipe or device stays one, a link stays one, the model and the ids stay whole."""
    (tmp_path / "ids.json").write_text("[1, 2]")
    copy = tmp_path / "m.hsr"
    copy.write_bytes(path.read_bytes())
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "link").symlink_to("old")
    logits = ("logits", copy, "--ids", tmp_path / "ids.json", "--out")
    refuses(*logits, copy, text="this command reads it")
    refuses(*logits, tmp_path / "ids.json", text="this command reads it")
    refuses(*logits, tmp_path, text="it is a folder")
    refuses(*logits, "", text="not a file name")
    refuses(*logits, "/", text="it is a folder")
    for name in ("/", str(tmp_path), str(tmp_path / "no" / "x"), str(copy)):
        refuses("bench", copy, "--depths", "4", "--json", name, text=re.escape(f"cannot write {name}"))
    assert copy.read_bytes() == path.read_bytes() and (tmp_path / "ids.json").read_text() == "[1, 2]"

    assert run(*logits, tmp_path / "link").returncode == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "old").stat().st_size == 2 * 4 * tiny.VOCAB

    os.mkfifo(tmp_path / "pipe")
    reader = subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE)
    assert run(*logits, tmp_path / "pipe").returncode == 0
    assert reader.communicate(timeout=60)[0] == (tmp_path / "old").read_bytes() and (tmp_path / "pipe").is_fifo()
    done = subprocess.run(command(*logits, "/dev/stdout"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60)
    assert done.stdout == (tmp_path / "old").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["ids.json", "link", "m.hsr", "old", "pipe"]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder that nobody can write")
def test_a_folder_that_takes_no_file_is_told_before_anything_is_computed(refuses, path, tmp_path) -> None:
    (tmp_path / "ids.json").write_text("[1]")
    for arguments in (("calibrate", path, "--out"), ("logits", path, "--ids", tmp_path / "ids.json", "--out"), ("bench", path, "--json")):
        refuses(*arguments, "/proc/self/x", text="cannot write /proc/self/x: no file can be made in /proc/")


@pytest.mark.python
def test_transcripts_to_impossible_places(path, tmp_path) -> None:
    lines = [f"/save {name}" for name in ("/", ".", "~nobody-here/x", f"{tmp_path}/no/x", "a\0b", str(path))]
    done = run("chat", path, input="\n".join(lines), stdin=None, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == "" and os.listdir(tmp_path) == []
    assert len(re.findall("^error: ", done.stderr, re.MULTILINE)) == len(lines)
    assert path.read_bytes()[:4] == b"GGUF"


@pytest.mark.python
@pytest.mark.parametrize("arguments", [("--help",), ("generate", "--help"), ("--version",), ("inspect",), ("inspect", "--json"),
                                       ("generate", "-p", "x", "--max-tokens", 2)])  # fmt: skip
def test_output_that_nobody_takes(path, tmp_path, arguments) -> None:
    """A pipe without a reader, and a full disk: no traceback, and never success for what was lost."""
    arguments = command(arguments[0], *([] if arguments[0].startswith("-") or "--help" in arguments else [path]), *arguments[1:])
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(arguments, stdout=writer, stderr=subprocess.PIPE, env=environment, timeout=60)
    os.close(writer)
    assert (done.stderr, done.returncode) in ((b"", 0), (b"", 1))
    with open("/dev/full", "w") as full:
        done = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, timeout=60)
    if "--help" in arguments or "--version" in arguments:
        assert "Traceback" not in done.stderr and "ignored" not in done.stderr
    else:
        assert (done.returncode, done.stderr) == (1, "hisparse-rt: cannot write the output: No space left on device\n")


@pytest.mark.python
def test_errors_that_nobody_reads(path, folder, tmp_path) -> None:
    """Without stderr, or with a full one, results are the same, and no message gets into the output."""
    expected = run("generate", path, "-p", "x", "--max-tokens", 2).stdout

    def without_stderr(*arguments) -> subprocess.CompletedProcess:
        return subprocess.run(command(*arguments), stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.close(2), timeout=60)

    done = without_stderr("generate", path, "-p", "x", "--max-tokens", 2)
    assert (done.returncode, done.stdout) == (0, expected)
    done = without_stderr("generate", "no-such", "-p", "x")
    assert (done.returncode, done.stdout) == (1, "")
    tiny.write_hf(tmp_path / "warns", tokenizer=None)
    done = without_stderr("convert", tmp_path / "warns", tmp_path / "w.hsr", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["warnings"]
    with open("/dev/full", "w") as full:
        arguments = command("generate", path, "-p", "x", "--max-tokens", 2)
        done = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=full, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, expected)


def test_ids_that_are_no_list_of_ids(refuses, path, tmp_path) -> None:
    ids = tmp_path / "ids.json"
    for content, text in (
        (b"[" * 100_000, "not JSON"), (b"[99999999999999999999]", "ids.json: token id 9{20}"),
        (b'["1"]', "ids.json: .*'1'"), (b"[[1]]", "ids.json"),
        (b"[1,2]]", "not JSON"), (b"\xff\xfe[1]", "not JSON"), (b"", "not JSON"), (b"null", "list"), (b"[null]", "None"),
    ):  # fmt: skip
        ids.write_bytes(content)
        refuses("logits", path, "--ids", ids, "--out", tmp_path / "out", text=text)
    refuses("logits", path, "--ids", tmp_path, "--out", tmp_path / "out", text="Is a directory")
    (tmp_path / "text").write_bytes(b"a\xff")
    refuses("bench", path, "--depths", "4", "--text", tmp_path / "text", text="not UTF-8.*byte 1")
    assert sorted(os.listdir(tmp_path)) == ["ids.json", "text"]


@pytest.mark.parametrize("arguments", [
    ("calibrate", "--text"), ("eval", "ppl", "--text"), ("eval", "needle", "--text"), ("eval", "recall", "--text"),
    ("bench", "--depths", "4", "--text"), ("logits", "--out", "out", "--ids"), ("generate", "-p", "x", "--profile"),
], ids=lambda arguments: "-".join(arguments[:2]))
def test_inputs_without_end(refuses, path, tmp_path, arguments, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    *before, option = arguments
    refuses(*before, path, option, "/dev/zero", text="/dev/zero is a device, not a file")
    assert os.listdir(tmp_path) == []


def test_memory_that_python_does_not_get(path, monkeypatch, capsys) -> None:
    from hisparse_rt import cli
    from hisparse_rt.commands import common

    for words, told in (((), ""), (("Unable to allocate 4 TiB",), ": Unable to allocate 4 TiB")):
        monkeypatch.setattr(common, "open_model", mock.Mock(side_effect=MemoryError(*words)))
        assert cli.main(["generate", os.fspath(path), "-p", "x"]) == 1
        assert capsys.readouterr() == ("", f"hisparse-rt: out of memory{told}\n")


# ---- conversion -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory) -> Path:
    """Takes about a second to convert."""
    cfg = tiny.config(hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8, head_dim=64)
    return tiny.write_hf(tmp_path_factory.mktemp("large"), cfg, tiny.weights(cfg))


@pytest.mark.python
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_conversion_that_is_ended(large_folder, tmp_path, number) -> None:
    """Nothing is left: not the temporary file, and the old output is as it was."""
    (tmp_path / "out.hsr").write_text("old")
    process = subprocess.Popen(command("convert", large_folder, tmp_path / "out.hsr", "--dtype", "q4"), stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while len(os.listdir(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(number)
    assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == 128 + number
    assert os.listdir(tmp_path) == ["out.hsr"] and (tmp_path / "out.hsr").read_text() == "old"


@pytest.mark.python
def test_a_generation_that_is_terminated(path) -> None:
    process = subprocess.Popen(
        command("generate", path, "-p", "x", "--max-tokens", 10**6, "--context", 10**7, "--beyond-trained", "--ram", "1GiB"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stdout.read(1)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (143, b"")


@pytest.mark.python
def test_two_conversions_to_one_file(large_folder, tmp_path) -> None:
    arguments = command("convert", large_folder, tmp_path / "out.hsr")
    both = [subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(2)]
    assert [process.communicate(timeout=120)[1] for process in both] == [b"", b""]
    assert [process.returncode for process in both] == [0, 0] and os.listdir(tmp_path) == ["out.hsr"]
    convert(large_folder, tmp_path / "alone.hsr")
    assert (tmp_path / "out.hsr").read_bytes() == (tmp_path / "alone.hsr").read_bytes()


@pytest.mark.python
def test_a_disk_that_fills_during_the_conversion_of_load(large_folder, tmp_path) -> None:
    limited = ["prlimit", "--fsize=1000000", *command("generate", large_folder, "--raw", "-p", "x")]
    done = subprocess.run(limited, capture_output=True, text=True, env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)}, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("hisparse-rt: cannot write ") and done.stderr.endswith("File too large\n")
    assert list((tmp_path / "hisparse_rt").iterdir()) == []


@pytest.mark.python
def test_destinations_of_a_conversion(refuses, folder, tmp_path) -> None:
    """A file of the source, also through a link, is refused; a link elsewhere stays a link."""
    tiny.write_gguf(tmp_path / "m.gguf")
    (tmp_path / "link.gguf").symlink_to("m.gguf")
    for source, out, text in (
        (tmp_path / "m.gguf", tmp_path / "m.gguf", "a file of the source"),
        (tmp_path / "m.gguf", tmp_path / "link.gguf", "a file of the source"),
        (folder, folder / "config.json", "a file of the source"),
        (folder, folder, "it is a folder"), (folder, "", "name of the destination is empty"),
        ("", tmp_path / "x", "name of the source is empty"), (folder, tmp_path / "no" / "x", "no folder"),
    ):  # fmt: skip
        refuses("convert", source, out, text=text)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out.hsr").symlink_to("elsewhere/out.hsr")
    for _ in range(2):
        assert run("convert", folder, tmp_path / "out.hsr").returncode == 0
    assert (tmp_path / "out.hsr").is_symlink() and os.listdir(tmp_path / "elsewhere") == ["out.hsr"]


@pytest.mark.python
def test_a_folder_that_may_not_be_written(folder, tmp_path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    no_override = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"] if os.geteuid() == 0 else []
    arguments = [*no_override, *command("convert", folder, tmp_path / "locked" / "x.hsr")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"hisparse-rt: cannot write {tmp_path}/locked/x.hsr: Permission denied\n"


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("model.safetensors", b"version 1 of a pointer\nsize 9\n", "model.safetensors: .*not a safetensors file"),
        ("model.safetensors", b"", "model.safetensors has only 0 bytes"),
        ("config.json", b'{"hidden_size": ' + b"9" * 10_000 + b"}", "config.json is not valid JSON"),
        ("config.json", b"[" * 200_000, "config.json is not valid JSON"),
        ("tokenizer.json", b"<!DOCTYPE html>", "tokenizer.json is not a tokenizer"),
        ("generation_config.json", b"{", "generation_config.json is not valid JSON"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is not UTF-8"),
    ],
)  # fmt: skip
def test_files_of_a_broken_download(refuses, tmp_path, name, content, text) -> None:
    tiny.write_hf(tmp_path / "hf")
    (tmp_path / "hf" / name).write_bytes(content)
    refuses("convert", tmp_path / "hf", tmp_path / "x.hsr", text=text)
    assert os.listdir(tmp_path) == ["hf"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("what", ["pipe", "/dev/zero"])
def test_parts_of_a_folder_that_are_no_files(refuses, tmp_path, name, what) -> None:
    """One would wait for a writer, the other has no end."""
    tiny.write_hf(tmp_path / "hf")
    (tmp_path / "hf" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "hf" / name) if what == "pipe" else os.symlink(what, tmp_path / "hf" / name)
    refuses("convert", tmp_path / "hf", tmp_path / "x.hsr", text=f"{name} is not a regular file")
    assert os.listdir(tmp_path) == ["hf"]


@pytest.mark.parametrize("changes", [{"rms_norm_eps": 1e300}, {"rope_theta": 1e35}, {"rms_norm_eps": 0}, {"rope_theta": -1}])
def test_what_could_not_be_loaded_is_not_converted(tmp_path, changes) -> None:
    cfg = tiny.config(**changes)
    with pytest.raises(ConvertError, match=f"{next(iter(changes))}.*positive number"):
        convert(tiny.write_hf(tmp_path / "hf", cfg, tiny.weights(tiny.config())), tmp_path / "x.hsr")


def test_recommended_options_that_are_none(tmp_path) -> None:
    recommended = {"temperature": "hot", "top_k": math.inf, "top_p": True, "min_p": 0.1, "do_sample": True, "repetition_penalty": None}
    report = convert(tiny.write_hf(tmp_path / "hf", generation_config=recommended), tmp_path / "m.hsr")
    assert len(report.warnings) == 1 and all(name in report.warnings[0] for name in ("temperature", "top_k", "top_p"))
    with hs.load(tmp_path / "m.hsr", ram="2MiB") as model:
        assert model.generation_defaults == {"min_p": 0.1, "do_sample": True}


def test_weight_files_that_belong_to_something_else(tmp_path) -> None:
    """A second copy in another layout, and an adapter, lie beside the weights of many downloads."""
    folder = tiny.write_hf(tmp_path / "hf")
    plain = convert(folder, tmp_path / "plain.hsr", "f32")
    tiny.write_safetensors(folder / "consolidated.safetensors", {"tok_embeddings.weight": np.ones((4, 4), np.float32)})
    tiny.write_safetensors(folder / "adapter_model.safetensors", {"base_model.x.lora_A.weight": np.ones((4, 4), np.float32)})
    both = convert(folder, tmp_path / "both.hsr", "f32")
    assert (both.tensors, both.bytes, both.warnings) == (plain.tensors, plain.bytes, ())


# ---- chat templates ---------------------------------------------------------------------------------------------

CHAT_FAULTS = [
    (None, TypeError, "a text or a list of messages, not NoneType"),
    (5, TypeError, "not int"),
    (b"hi", TypeError, "not bytes"),
    ({"role": "user", "content": "x"}, TypeError, "not dict"),
    (["x"], TypeError, "message 0 is a str"),
    ([{"role": "user", "content": None}], ValueError, "message 0 has no content"),
    ([{"role": "user", "content": 5}], TypeError, "content of message 0 is a int"),
    ([{"role": "user", "content": object()}], TypeError, "content of message 0"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], ValueError, "part of type 'image_url'"),
    ([{"role": "user", "content": ["x"]}], ValueError, "part of type 'str'"),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], ValueError, "part of type 'text'"),
    ([{"role": "user", "content": "\ud800"}], ValueError, "half a character"),
]


@pytest.mark.parametrize(("messages", "kind", "text"), CHAT_FAULTS)
def test_messages_that_are_no_text(model, messages, kind, text) -> None:
    """A template would print them the way Python spells them, and the model would answer that."""
    with pytest.raises(kind, match=text):
        model.chat(messages)


def test_more_message_faults(model) -> None:
    with pytest.raises(TypeError, match="message 0 is a str"):
        model.chat(["x"], system="s")
    with pytest.raises(TypeError, match="content of message 0"):
        model.chat("x", system=5)
    with pytest.raises(TypeError, match="message 0 is a str"):
        model.chat("x", history="abc")
    with pytest.raises(ValueError, match="cannot replace 'messages'"):
        model.chat("x", variables={"messages": 1})
    with pytest.raises(TypeError, match="variables"):
        model.chat("x", variables="abc")


def test_content_in_parts_is_text(model) -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "you"}]
    assert model.chat_ids([{"role": "user", "content": parts}]).tolist() == model.chat_ids("hello\nyou").tolist()


@pytest.mark.python
@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}", "no system role"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "RecursionError"),
        ("{% include 'x' %}", "TypeError"),
        ("", "has no chat template"),
        ("{# nothing #}", "makes nothing of these messages"),
        ("{{ messages[0].content | frobnicate }}", "frobnicate"),
    ],
)
def test_a_template_that_cannot_serve(refuses, tmp_path, template, text) -> None:
    """Chat fails with the template's words; continuing a text works all the same."""
    convert(tiny.write_hf(tmp_path / "hf", chat_template=template), tmp_path / "m.hsr")
    refuses("generate", tmp_path / "m.hsr", "-p", "hi", "--system", "s", text=text)
    assert run("generate", tmp_path / "m.hsr", "-p", "hi", "--raw", "--max-tokens", 2).returncode == 0


# ---- end of text, stop strings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "config", "gguf"),
    [([300, 301], 300, False), (301, 300, False), (None, [300, 301], False), (None, 301, False), (None, None, True)],
)
def test_every_end_id_of_every_file_ends(tmp_path, generation, config, gguf) -> None:
    """Ids of the end are spread over several files; the text stops at whichever comes, and its name is not shown."""
    ids = [one("Z"), one("a"), one("b"), 301, one("c"), one("d"), 1, one("e"), one("f")]
    if gguf:
        folder = tiny.script_model(tmp_path / "hf", dict(itertools.pairwise(ids)))
        cfg = json.loads((folder / "config.json").read_text())
        keys = {"tokenizer.ggml.eot_token_id": 301}
        convert(tiny.write_gguf(tmp_path / "m.gguf", cfg, load_file(folder / "model.safetensors"), keys=keys), tmp_path / "m.hsr", "f32")
        path = tmp_path / "m.hsr"
    else:
        settings = {} if generation is None else {"generation_config": {"eos_token_id": generation}}
        folder = tiny.script_model(tmp_path / "hf", dict(itertools.pairwise(ids)), tokenizer_config={"eos_token": tiny.EOS}, **settings)
        values = json.loads((folder / "config.json").read_text()) | {"eos_token_id": config}
        (folder / "config.json").write_text(json.dumps(values))
        convert(folder, tmp_path / "m.hsr", "f32")
        path = tmp_path / "m.hsr"
    with hs.load(path, ram="16MiB", threads=1) as model:
        assert {1, 301} <= set(model.info.eos_tokens)
        result = hs.generate(model, "Z", return_details=True)
        assert (result.text, result.finish_reason, result.tokens[-1]) == ("ab", "stop", 301)
        result = hs.generate(model, [one("c")], return_details=True)
        assert (result.text, result.finish_reason, result.tokens[-1]) == ("d", "stop", 1)
        on = hs.generate(model, "Z", ignore_eos=True, max_tokens=8, return_details=True)
        assert (on.tokens, on.finish_reason) == (tuple(ids[1:]), "length") and on.text.startswith("ab") and "cdef" in on.text


def test_the_prompt_is_not_searched_for_stop_strings(tmp_path) -> None:
    path = reciting(tmp_path, [one(letter) for letter in "Zabcdef"])
    with hs.load(path, ram="16MiB", threads=1) as model:
        assert hs.generate(model, "xabZ", stop=["xab", "bZa", "Za"], max_tokens=6) == "abcdef"
        for stop, left in ((["cd"], "ab"), (["de", "cde"], "ab"), (["f", "abc"], ""), (["g", "fg"], "abcdef")):
            whole = hs.generate(model, "Z", stop=stop, max_tokens=6)
            assert whole == "".join(hs.generate(model, "Z", stop=stop, max_tokens=6, stream=True)) == left


# ---- the end of the context -------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [1, 8, 63, 64, 65, 128])
def test_output_ends_at_the_border(model, context) -> None:
    with model.session(context=context) as session:
        with pytest.raises(hs.ContextError, match=f"{context}"):
            session.append([5] * (context + 1))
        session.append([5])
        if context == 1:
            with pytest.raises(hs.ContextError):
                session.generate(max_tokens=5)
        else:
            result = session.generate(max_tokens=(1 << 31) - 1, return_details=True)
            assert (result.finish_reason, len(result.tokens)) == ("length", context - 1)
        assert session.n_tokens == context
        with pytest.raises(hs.ContextError):
            session.append([5])
        session.truncate(context // 2)
        if context > 1:
            assert session.generate(max_tokens=1000, return_details=True).tokens == result.tokens[context // 2 - 1 :]


def test_a_prompt_far_too_long_costs_nothing(model) -> None:
    before = model.stats()
    for n in (513, 100_000, 5_000_000):
        with pytest.raises(hs.ContextError, match=f"{n} tokens"):
            hs.generate(model, np.full(n, 5, np.int32))
    assert model.stats() == before


# ---- dialogues that are edited ----------------------------------------------------------------------------------


def test_edited_dialogues_equal_fresh_ones(model) -> None:
    """Turns cut short, words changed afterwards, turns taken back: what is reused never differs from what is computed anew."""
    draws = random.Random(5)
    words = TOKENIZER.encode(tiny.TEXT).ids[3:40]
    chat = model.conversation(context=512)
    for turn in range(40):
        text = TOKENIZER.decode(draws.sample(words, draws.randint(1, 8)))
        options = {"max_tokens": draws.randint(1, 8), "ignore_eos": True, "seed": turn, "temperature": draws.choice([0.0, 1.0])}
        fresh = model.chat(text, history=chat.messages, **options)
        if draws.random() < 0.3:
            pieces = chat.stream(text, **options)
            part = next(pieces, "")
            pieces.close()
            assert fresh.startswith(part)
        else:
            assert chat.send(text, **options) == fresh
        change = draws.random()
        if change < 0.2 and chat.messages:
            position = draws.randrange(len(chat.messages))
            chat.messages[position] = {**chat.messages[position], "content": TOKENIZER.decode(draws.sample(words, 3))}
        elif change < 0.4:
            del chat.messages[draws.randrange(len(chat.messages) + 1) // 2 * 2 :]
        elif change < 0.45 or len(chat.messages) > 8:
            chat.reset()
    chat.close()


# ---- neighbours -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def explosive(tmp_path_factory) -> Path:
    """Every weight is finite, but the token 'Q' makes logits that are not."""
    folder = tmp_path_factory.mktemp("explosive")
    tiny.script_model(folder, {token: (token + 1) % tiny.VOCAB for token in range(tiny.VOCAB)})
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][:, one("Q")] = 3e38
    tiny.write_safetensors(folder / "model.safetensors", weights)
    convert(folder, folder / "m.hsr", "f32")
    return folder / "m.hsr"


def test_numbers_that_explode_end_one_request_only(explosive) -> None:
    with hs.load(explosive, ram="16MiB", threads=2) as model:
        options = {"max_tokens": 9, "ignore_eos": True}
        prompts = ["a", "aQ", [300], "Q"]
        alone = [hs.generate(model, prompt, **options) for prompt in (prompts[0], prompts[2])]
        results = hs.generate(model, prompts, return_exceptions=True, **options)
        assert [results[0], results[2]] == alone
        assert all(isinstance(results[i], hs.NonFiniteError) for i in (1, 3))
        with model.session() as session:
            session.append("aQ")
            with pytest.raises(hs.NonFiniteError):
                session.generate(max_tokens=1)
            session.truncate(1)
            session.rebuild()
            assert session.generate(**options) == alone[0]
        assert model.stats().hot_blocks_reserved == 0


def test_all_tokens_banned_is_an_error_of_that_request(model) -> None:
    everything = {token: -math.inf for token in range(tiny.VOCAB)}
    with pytest.raises(ValueError, match="bans every token"):
        hs.generate(model, "x", logit_bias=everything)
    del everything[70]
    result = hs.generate(model, "x", logit_bias=everything, temperature=1e6, max_tokens=5, return_details=True)
    assert result.tokens == (70,) * 5


def test_every_pair_of_border_values(model) -> None:
    """Some token is always left, none of them is banned, and greedy stays greedy."""
    greedy = hs.generate(model, "x", max_tokens=1, return_details=True).tokens
    for temperature, top_k, top_p, min_p in itertools.product((0, 1e-38, 1e-6, 1, 1e6), (0, 1, 320, 321), (1e-9, 1), (0, 1)):
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        tokens = hs.generate(model, "x", max_tokens=1, seed=3, return_details=True, **options).tokens
        if temperature <= 1e-6 or top_k == 1 or top_p < 1 or min_p == 1:
            assert tokens == greedy, options


# ---- the machine ------------------------------------------------------------------------------------------------


@pytest.mark.python
def test_threads_follow_the_processors_this_process_may_use(path) -> None:
    """One processor allowed: one thread by default. Far too many threads are slow, not stuck, and change nothing."""
    code = """
        import os, sys
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        import hisparse_rt as hs
        for threads in (0, 1, 40):
            with hs.load(sys.argv[1], ram="4MiB", threads=threads) as model:
                print(model.stats().n_threads, hs.generate(model, [5], max_tokens=4, return_details=True).tokens)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), path], capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["1", "1", "40"], done.stderr
    assert len({line.partition(" ")[2] for line in lines}) == 1


@pytest.mark.python
@pytest.mark.parametrize("first", ["numpy", "hisparse_rt"])
def test_imports_in_any_order(path, first) -> None:
    second = {"numpy": "hisparse_rt", "hisparse_rt": "numpy"}[first]
    code = f"import {first}, {second}, sys; hisparse_rt.load(sys.argv[1], ram='2MiB').close()"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- misuse of the C interface ----------------------------------------------------------------------------------


def test_no_call_falls_over_missing_arguments(path) -> None:
    """Every function, with NULL for everything, then with real handles and NULL or extreme numbers for the rest."""
    err = ffi.new("hsr_error *")
    err.struct_size = ffi.sizeof("hsr_error")
    with hs.load(path, ram="4MiB", threads=1) as model, model.session() as session:
        expected = hs.generate(model, "x", max_tokens=3)
        real = {
            "struct hsr_engine *": model._native.engine.pointer, "struct hsr_model *": model._native.model.pointer,
            "struct hsr_session *": session._handle.pointer, "struct hsr_error *": err,
        }  # fmt: skip
        functions = {name: getattr(lib, name) for name in dir(lib) if name.startswith("hsr_") and callable(getattr(lib, name))}
        assert len(functions) >= 28
        for fill, handles in ((0, {}), (0, real), (-1, real), (1 << 63, real)):
            for name, function in functions.items():
                arguments = [_argument(kind, fill, handles) for kind in ffi.typeof(function).args]
                result = function(*arguments)
                assert not isinstance(result, int) or result <= 1, name
        assert hs.generate(model, "x", max_tokens=3) == expected


def _argument(kind, fill: int, handles: dict):
    if kind.kind in ("pointer", "function"):
        return handles.get(kind.cname.replace(" const", ""), ffi.NULL)
    bits = 8 * ffi.sizeof(kind)
    value = fill & ((1 << bits) - 1)
    return value if kind.cname.startswith("uint") or value < 1 << (bits - 1) else value - (1 << bits)


def test_sizes_are_64_bit_everywhere() -> None:
    """Byte counts and positions of the interface must not wrap at 4 GiB."""
    structs = ("hsr_model_info", "hsr_engine_opts", "hsr_engine_stats", "hsr_session_stats")
    for struct, (name, field) in ((kind, item) for kind in structs for item in ffi.typeof(kind).fields):
        if name.endswith("bytes") or name.startswith(("prefill_tokens", "decode_tokens", "n_params")):
            assert field.type.cname == "uint64_t", f"{struct}.{name}"
    for name in ("append", "logits", "tokens", "truncate"):
        arguments = [kind.cname for kind in ffi.typeof(getattr(lib, f"hsr_session_{name}")).args]
        assert any("uint64_t" in kind for kind in arguments) and "uint32_t" not in arguments, name


def test_extreme_counts_are_refused_before_memory_is_touched(model) -> None:
    err = ffi.new("hsr_error *")
    err.struct_size = ffi.sizeof("hsr_error")
    ids, out, n = ffi.new("int32_t[4]", [1, 2, 3, 4]), ffi.new("float[8]"), ffi.new("uint64_t *", (1 << 64) - 1)
    with model.session() as session:
        handle = session._handle.pointer
        for count in (513, 1 << 31, 1 << 62, (1 << 64) - 1):
            assert lib.hsr_session_append(handle, ids, count, err) == lib.HSR_E_CONTEXT
            assert lib.hsr_session_truncate(handle, count, err) == lib.HSR_E_INVALID
            assert lib.hsr_session_logits(handle, ids, count, out, 8, err) < 0
        for count in (1 << 58, ((1 << 64) - 1) // 320 + 1):  # count * 320 wraps
            assert lib.hsr_session_logits(handle, ids, count, out, count * 320 % (1 << 64), err) < 0
        assert lib.hsr_session_tokens(handle, (1 << 64) - 1, ids, n, err) == 0 and n[0] == 0
        assert session.n_tokens == 0
