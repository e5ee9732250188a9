# SPDX-License-Identifier: Apache-2.0
"""The default text for calibration: docstrings of the Python standard library that runs us. Prose and code, on every machine."""

from __future__ import annotations

import ast
import os
import threading
from collections.abc import Iterator
from pathlib import Path


# Some versions of Python miscount the depth of trees that several threads parse at a time, and raise SystemError.
_parsing = threading.Lock()


def library_docstrings(characters: int) -> str:
    """At least so many characters of docstrings, in order of file names, or all there are."""
    parts: list[str] = []
    size = 0
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        for text in _docstrings(path):
            parts.append(text)
            size += len(text) + 2
            if size >= characters:
                return "\n\n".join(parts)
    return "\n\n".join(parts)


def _docstrings(path: Path) -> Iterator[str]:
    try:
        with _parsing:
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield text
