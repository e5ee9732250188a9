# SPDX-License-Identifier: Apache-2.0
"""What the compiled library exports, needs and contains. Reads the objects of the release build and the installed library."""

import platform
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Things a library in somebody else's process does not do.
FORBIDDEN = set("""
    abort exit _exit _Exit quick_exit atexit __cxa_atexit on_exit
    printf fprintf vprintf vfprintf puts fputs putchar fputc fwrite perror __printf_chk __fprintf_chk __vfprintf_chk
    getenv secure_getenv setenv putenv unsetenv environ
    signal sigaction raise kill fork vfork system popen execve execvp posix_spawn
    setlocale srand rand srandom random
""".split())

# Memory comes from base/array.h.
ALLOCATION = {"malloc", "calloc", "realloc", "reallocarray", "aligned_alloc", "posix_memalign", "memalign", "strdup", "strndup",
              "asprintf", "vasprintf"}


def run(*command) -> str:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def library(package) -> Path:
    return package / "_native/libhisparse_rt.so"


@pytest.fixture(scope="module")
def objects(build) -> list[Path]:
    found = sorted(p for d in ("libhisparse_rt_internal.a.p", "libkernels_*.a.p") for p in build.glob(f"{d}/*.o"))
    assert len(found) > 20
    return found


def undefined(path: Path) -> set[str]:
    return {line.split()[-1].split("@")[0] for line in run("nm", "-u", path).splitlines() if line.strip()}


def test_exports_equal_map_equal_header(library, header):
    exported = {line.split()[-1].split("@")[0] for line in run("nm", "-D", "--defined-only", library).splitlines() if " T " in line}
    others = [line for line in run("nm", "-D", "--defined-only", library).splitlines() if " T " not in line and " A " not in line]
    mapped = set(re.findall(r"\b(hsr_\w+);", (ROOT / "runtime/libhisparse_rt.map").read_text()))
    declared = set(re.findall(r"^HSR_API [^;]*?(hsr_\w+)\(", header.read_text(), re.M))
    assert exported == mapped == declared
    assert not others


def test_needs_only_the_c_library(library):
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", library)))
    assert {n.split(".so")[0] for n in needed} <= {"libc", "libm", "libpthread", "ld-linux-x86-64", "ld-linux-aarch64"}


def test_does_nothing_to_the_process(library):
    assert not undefined(library) & FORBIDDEN


def test_allocates_in_one_place(objects):
    users = {p.name for p in objects if undefined(p) & ALLOCATION}
    assert users == {"runtime_base_array.c.o"}


def test_no_global_state(objects):
    """No writable variables, no thread-local ones, no constructors. Relocated constant tables are fine."""
    bad = []
    for path in objects:
        for line in run("size", "-A", path).splitlines():
            name, size = (line.split() + ["", ""])[:2]
            if re.fullmatch(r"\.(data|bss|tdata|tbss|init_array|ctors|fini_array|dtors)(\..*)?", name) and size != "0":
                if not name.startswith(".data.rel.ro"):
                    bad.append(f"{path.name}: {name} {size} bytes")
    assert not bad


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 encodings")
def test_wide_instructions_only_behind_the_dispatch(objects):
    """VEX or EVEX code elsewhere would end a process on a processor of the baseline."""
    def wide(path):
        return re.search(r"%[yz]mm|\tv[a-z0-9]+ .*%xmm", run("objdump", "-d", "--no-show-raw-insn", path))

    users = {p.name for p in objects if wide(p)}
    assert users == {p.name for p in objects if re.fullmatch(r"runtime_device_cpu_x86_\w+_(avx2|avx512|avx512vnni|amx)\.c\.o", p.name)}
    assert {f"runtime_device_cpu_x86_kernels_{level}.c.o" for level in ("avx2", "avx512", "amx")} <= users
