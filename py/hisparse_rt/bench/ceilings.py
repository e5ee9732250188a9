# SPDX-License-Identifier: Apache-2.0
"""What the machine can do: measured by a small program of its own, beside the native library."""
from __future__ import annotations

import statistics
import subprocess
from collections import defaultdict
from importlib import resources
from pathlib import Path

from .programs import MeasureError

_SECONDS = 0.4


class Ceilings:
    """Medians of what was measured in the course of a run."""

    def __init__(self, program: Path, threads: int, level: str) -> None:
        self._program, self._threads, self.level = program, threads, level
        self._reads: dict[int, list[float]] = defaultdict(list)
        self._multiplies: list[float] = []

    def measure(self, n_bytes: int) -> None:
        """Once more, reading a buffer of n_bytes."""
        self._reads[n_bytes].append(read(self._program, n_bytes, self._threads))
        self._multiplies.append(multiply(self._program, self.level, self._threads))

    def bytes_per_second(self, n_bytes: int) -> float | None:
        return statistics.median(self._reads[n_bytes]) if self._reads[n_bytes] else None

    @property
    def operations_per_second(self) -> float | None:
        return statistics.median(self._multiplies) if self._multiplies else None

    def facts(self) -> dict[str, object]:
        return {
            "level": self.level, "operations_per_second": self.operations_per_second,
            "read": [{"bytes": n, "bytes_per_second": self.bytes_per_second(n)} for n in sorted(self._reads)],
        }


def find() -> Path | None:
    """The measuring program; None in an installation without it (an editable one)."""
    path = Path(str(resources.files(__package__.rpartition(".")[0]))) / "_native" / "ceilings"
    return path if path.is_file() else None


def read(program: Path, n_bytes: int, threads: int) -> float:
    """Bytes per second when `threads` threads read a buffer of n_bytes again and again."""
    return _run(program, "read", str(max(n_bytes, 4096)), threads)


def multiply(program: Path, level: str, threads: int) -> float:
    """Operations per second, a multiplication and an addition counting as two, at one of the engine's levels."""
    return _run(program, "multiply", level, threads)


def _run(program: Path, what: str, argument: str, threads: int) -> float:
    done = subprocess.run([program, what, argument, str(threads), str(_SECONDS)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MeasureError(done.stderr.strip() or f"{program} ended with {done.returncode}")
    return float(done.stdout)
