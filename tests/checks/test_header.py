# SPDX-License-Identifier: Apache-2.0
"""The public header: compiles alone in every language it promises, and says the same as the declarations Python uses."""

import re
import shutil
import subprocess
from pathlib import Path

import cffi
import pytest

ROOT = Path(__file__).parents[2]


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.S)


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize("standard", ["c99", "c11", "c++17"])
def test_compiles_alone(tmp_path, header, compiler, standard):
    cplusplus = standard.startswith("c++")
    driver = {"gcc": "g++", "clang": "clang++"}[compiler] if cplusplus else compiler
    if not shutil.which(driver):
        pytest.skip(f"no {driver}")
    source = tmp_path / ("alone.cpp" if cplusplus else "alone.c")
    source.write_text(f'#include "{header}"\n#include "{header}"\nint hsr_used; hsr_error hsr_e = HSR_ERROR_INIT;\n')
    run = subprocess.run([driver, f"-std={standard}", "-pedantic", "-Wall", "-Wextra", "-Werror", "-c", source, "-o", tmp_path / "alone.o"],
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def declarations(text: str) -> dict[str, str]:
    """name -> whole declaration of every function, white space made uniform"""
    found = {}
    for statement in without_comments(text).split(";"):
        m = re.search(r"([\w \t\n*]+?)\b(hsr_\w+)\s*\((.*)\)\s*$", statement, re.S)
        if m and "typedef" not in m.group(1) and "{" not in m.group(1):
            found[m.group(2)] = re.sub(r"\s+", " ", re.sub(r"\s*([*(),])\s*", r"\1", m.group(0).replace("HSR_API", ""))).strip()
    return found


def preprocessed(header: Path) -> str:
    text = subprocess.run(
        ["gcc", "-E", "-P", "-DHSR_API=", "-x", "c", "-"],
        input=without_comments(re.sub(r"#\s*include[^\n]*|#if defined\(__GNUC__\).*?#endif", "", header.read_text(), flags=re.S)),
        capture_output=True, text=True, check=True)
    return text.stdout


def test_python_declares_the_same_functions(header):
    public = declarations(preprocessed(header))
    ours = declarations(re.sub(r'extern "Python[^;{]*;', "", (ROOT / "py/hisparse_rt/_cdef.txt").read_text()))
    assert len(public) > 20
    assert set(ours) == set(public)
    assert ours == public


def test_python_declares_the_same_structs(header):
    """cffi parses both; every struct has the same fields of the same types at the same places."""
    public, ours = cffi.FFI(), cffi.FFI()
    public.cdef(preprocessed(header))
    ours.cdef((ROOT / "py/hisparse_rt/_cdef.txt").read_text())
    names = [n for n in public.list_types()[0] if n.startswith("hsr_")]
    assert "hsr_engine_opts" in names
    assert set(names) <= set(ours.list_types()[0])
    for name in names:
        a, b = public.typeof(name), ours.typeof(name)
        assert a.kind == b.kind, name
        if a.kind == "struct" and a.fields is not None:
            assert [(f, d.offset, d.type.cname) for f, d in a.fields] == [(f, d.offset, d.type.cname) for f, d in b.fields], name


def test_python_declares_the_constants(header):
    """The values come from the compiler; only the names can be forgotten."""
    names = set(re.findall(r"^#define (HSR_(?!API|ERROR_INIT)\w+)[ \t]+\S", without_comments(header.read_text()), re.M))
    ours = (ROOT / "py/hisparse_rt/_cdef.txt").read_text()
    assert "HSR_E_CONTEXT" in names
    assert not [n for n in sorted(names) if not re.search(rf"\b{n}\b", ours)]


def test_every_function_states_its_rules(header):
    """since, threads, blocks and alloc, in the comment before each function"""
    text = header.read_text()
    bad = []
    for m in re.finditer(r"^HSR_API [^;]*?(hsr_\w+)\(", text, re.M):
        comment = text[text.rindex("/**", 0, m.start()):m.start()]
        bad += [f"{m.group(1)}: {tag}" for tag in ("@since", "@threads", "@blocks", "@alloc") if tag not in comment]
    assert not bad
