# SPDX-License-Identifier: Apache-2.0
"""Rules that every source file keeps: includes point down, every C file is built, licence line, white space, line length."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# folder of a source -> folders it may include from, besides its own and the public header
MAY_INCLUDE = {
    "base": set(),
    "container": {"base"},
    "io": {"base"},
    "device": {"base"},
    "kv": {"device", "io", "base"},
    "sparse": {"kv", "device", "base"},
    "models": {"kv", "device", "container", "base"},
    "engine": {"models", "sparse", "kv", "device", "io", "container", "base"},
    "api": {"engine", "models", "sparse", "kv", "device", "io", "container", "base"},
}


def folder(include: str) -> str:
    """Layer of an included file: its first folder. The headers of models/ are named without one."""
    return include.split("/")[0] if "/" in include else "models"


def upward(layer: str, text: str) -> list[str]:
    """Includes in the text of a file of this layer that its layer may not have."""
    bad = []
    for include in re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.M):
        target = folder(include)
        if target not in {"hisparse_rt", layer} | MAY_INCLUDE[layer]:
            bad.append(include)
    return bad


def c_files(*tops: str) -> list[Path]:
    return sorted(p for top in tops for p in (ROOT / top).rglob("*") if p.suffix in (".c", ".h", ".cpp", ".cu", ".cuh"))


def layer_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[1] if parts[0] == "runtime" else parts[0]


def test_includes_point_down():
    bad = []
    for path in c_files("runtime", "models"):
        if "include" in path.parts:
            continue
        layer = layer_of(path)
        assert layer in MAY_INCLUDE, f"{path}: no such layer"
        bad += [f"{path.relative_to(ROOT)}: {name}" for name in upward(layer, path.read_text())]
    assert not bad


@pytest.mark.parametrize("layer, include, ok", [
    ("base", "kv/page.h", False), ("kv", "engine/engine.h", False), ("kv", "container/container.h", False),
    ("device", "kv/page.h", False), ("models", "engine/engine.h", False), ("models", "kv/cache.h", True),
    ("engine", "model.h", True), ("kv", "model.h", False), ("api", "base/status.h", True), ("engine", "api/api.h", False),
])
def test_the_rule_itself(layer, include, ok):
    assert (upward(layer, f'#include <stdio.h>\n#include "{include}"\n') == []) == ok


def test_every_c_file_is_built():
    listed = set(re.findall(r"'((?:runtime|models)/[\w/]+\.c)'", (ROOT / "meson.build").read_text()))
    on_disk = {str(p.relative_to(ROOT)) for p in c_files("runtime", "models") if p.suffix == ".c" and "x86" not in p.parts}
    # Those of x86/ are found by their level, and some are also named.
    assert {name for name in listed if "/x86/" not in name} == on_disk


def test_file_names_are_unique():
    names = [p.name for p in c_files("runtime", "models")]
    assert not {n for n in names if names.count(n) > 1}


def test_licence_line_and_white_space():
    bad = []
    files = c_files("runtime", "models", "tests", "cutlass_kernels")
    files += [p for top in ("py", "tools", "tests", "scripts") for p in (ROOT / top).rglob("*.py")]
    for path in files:
        lines = path.read_text().splitlines()
        if not any("SPDX-License-Identifier: Apache-2.0" in line for line in lines[:2]):
            bad.append(f"{path}: no licence line")
        bad += [f"{path}:{i}: tab or trailing space" for i, line in enumerate(lines, 1) if "\t" in line or line != line.rstrip()]
    assert not bad


def test_lines_are_at_most_140_columns():
    bad = []
    files = c_files("runtime", "models", "tests", "cutlass_kernels") + [ROOT / "meson.build"]
    files += [p for top in ("py", "tools", "tests", "scripts") for p in (ROOT / top).rglob("*") if p.suffix in (".py", ".sh", ".build")]
    for path in files:
        bad += [f"{path}:{i}: {len(line)} columns" for i, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 140]
    assert not bad
