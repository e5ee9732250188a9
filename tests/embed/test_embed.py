# SPDX-License-Identifier: Apache-2.0
"""Hosts in C, C++ and Rust, built against the installed package as its users would, give the tokens that Python gives."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

import hisparse_rt as hs
from hisparse_rt.tools.convert import convert

HERE = Path(__file__).parent
IDS = [1, 5, 9, 2, 77, 31]


def flags(option: str) -> list[str]:
    """What `python -m hisparse_rt OPTION` prints, run where no checkout can be mistaken for the package."""
    run = subprocess.run([sys.executable, "-m", "hisparse_rt", option], capture_output=True, text=True, check=True, cwd="/")
    return run.stdout.split()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("embed")
    convert(tiny.write_hf(folder / "hf"), folder / "tiny.hsr", "f32")
    return folder / "tiny.hsr"


def python_tokens(model: Path) -> list[int]:
    with hs.load(model) as loaded:
        result = hs.generate(loaded, IDS, max_tokens=16, ignore_eos=True, return_details=True)
    assert len(result.tokens) == 16
    return list(result.tokens)


def run(*command) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def tokens(program: Path, model: Path) -> list[int]:
    return [int(t) for t in run(program, model, *IDS).split()]


def library() -> Path:
    """The shared library that --libs links, for hosts that load it themselves."""
    return Path(next(f[2:] for f in flags("--libs") if f.startswith("-L"))) / "libhisparse_rt.so"


@pytest.mark.parametrize("command", [
    ["cc", "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", HERE / "embed.c"],
    ["c++", "-std=c++17", "-pedantic", "-Wall", "-Wextra", "-Werror", HERE / "embed.cpp"],
], ids=["c", "c++"])
def test_c_and_cpp(tmp_path, model, command):
    program = tmp_path / "embed"
    run(*command, *flags("--cflags"), *flags("--libs"), "-o", program)
    assert tokens(program, model) == python_tokens(model)


def test_rust(tmp_path, model):
    """Plain declarations, no crates: the interface needs no C compiler on the host's side."""
    if not shutil.which("rustc"):
        pytest.skip("no rustc")
    program = tmp_path / "embed"
    folder = next(f[2:] for f in flags("--libs") if f.startswith("-L"))
    run("rustc", "--edition", "2021", "-D", "warnings", HERE / "embed.rs", "-L", folder, "-l", "hisparse_rt",
        "-C", f"link-arg=-Wl,-rpath,{folder}", "-o", program)
    assert tokens(program, model) == python_tokens(model)


def test_pkg_config(tmp_path, model):
    if not shutil.which("pkg-config"):
        pytest.skip("no pkg-config")
    (folder,) = flags("--pkgconfigdir")
    found = run("env", f"PKG_CONFIG_PATH={folder}", "pkg-config", "--cflags", "--libs", "hisparse_rt").split()
    program = tmp_path / "embed"
    run("cc", HERE / "embed.c", *found, "-Wl,-rpath," + str(Path(folder).parent), "-o", program)
    assert tokens(program, model) == python_tokens(model)


def test_failure_names_the_culprit(tmp_path, model):
    program = tmp_path / "embed"
    run("cc", HERE / "embed.c", *flags("--cflags"), *flags("--libs"), "-o", program)
    missing = subprocess.run([program, tmp_path / "none.hsr", "1"], capture_output=True, text=True)
    assert missing.returncode == 1
    assert "HSR_E_IO" in missing.stderr and "none.hsr" in missing.stderr
    outside = subprocess.run([program, model, "1", "123456789"], capture_output=True, text=True)
    assert outside.returncode == 1
    assert "HSR_E_TOKEN" in outside.stderr and "123456789" in outside.stderr


def test_sessions_in_cpp(tmp_path, model):
    """Eight threads, a session each, one engine. The program itself compares with single runs."""
    program = tmp_path / "embed_sessions"
    run("c++", "-std=c++17", "-pedantic", "-Wall", "-Wextra", "-Werror", "-pthread", HERE / "embed_sessions.cpp", *flags("--cflags"),
        *flags("--libs"), "-o", program)
    lines = [[int(t) for t in line.split()] for line in run(program, model, *IDS).splitlines()]
    assert [len(line) for line in lines] == list(range(16, 24))
    assert lines[0] == python_tokens(model)


def test_sessions_in_python(model):
    """Eight prompts of different lengths in one call equal eight calls."""
    prompts = [IDS[i:] + IDS * i for i in range(6)] + [IDS * 9, IDS[:1]]
    options = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.8, "return_details": True}
    with hs.load(model) as loaded:
        together = hs.generate(loaded, prompts, seed=list(range(8)), **options)
    with hs.load(model) as loaded:
        alone = [hs.generate(loaded, prompt, seed=i, **options) for i, prompt in enumerate(prompts)]
    assert [r.tokens for r in together] == [r.tokens for r in alone]
    assert len({tuple(r.tokens) for r in together}) == 8


def test_load_and_unload(tmp_path, model):
    program = tmp_path / "reload"
    run("cc", "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", HERE / "reload.c", *flags("--cflags"), "-ldl", "-o", program)
    words = run(program, library(), model, *IDS).split()
    assert words[:4] == ["threads", "1", "files", "0"]
    assert float(words[5]) < 20, "KiB kept after each load"


def test_first_token(tmp_path, model):
    """The benchmark program itself. Its times are a question for a quiet machine and a real model."""
    program = tmp_path / "first_token"
    run("cc", "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", HERE / "first_token.c", *flags("--cflags"), *flags("--libs"),
        "-o", program)
    assert re.search(r"first token [\d.]+ ms", run(program, model))
