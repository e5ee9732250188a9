# SPDX-License-Identifier: Apache-2.0
"""The command line as a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys


def command(*arguments) -> list[str]:
    return [sys.executable, "-m", "hisparse_rt.cli", *map(os.fspath, map(_text, arguments))]


def _text(value) -> str | bytes | os.PathLike:
    return value if isinstance(value, (bytes, os.PathLike)) else str(value)


def run(*arguments, **options) -> subprocess.CompletedProcess:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120, **({"stdin": subprocess.DEVNULL} | options))


def fails(*arguments, code: int = 1, text: str = "", **options) -> str:
    """The command ends with `code` and one line on stderr (wrong usage: the usage and one line), and prints nothing else."""
    done = run(*arguments, **options)
    lines = done.stderr.strip().splitlines()
    assert (done.returncode, done.stdout) == (code, ""), done
    assert "Traceback" not in done.stderr and lines[-1].startswith("hisparse-rt") and re.search(text, lines[-1]), done.stderr
    assert code == 2 or len(lines) == 1
    return lines[-1]
