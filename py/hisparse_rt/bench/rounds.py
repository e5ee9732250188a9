# SPDX-License-Identifier: Apache-2.0
"""Who is measured when. Programs take turns at every depth, so that a busy minute of the machine falls on all of them."""
from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .job import Point
from .programs import OURS, LimitError, MeasureError, Program

Say = Callable[[str], None]
Measure = Callable[[Program, Point, float | None], dict[str, Any]]


@dataclass
class Limits:
    """Seconds: of one measurement, and of all of them together. None is no limit."""

    one: float | None = None
    all: float | None = None


@dataclass
class Samples:
    """Everything that was measured, and why the rest was not."""

    runs: dict[tuple[str, Point], list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    skipped: list[dict[str, Any]] = field(default_factory=list)


class Rounds:
    """Measures every program at every point, once per round."""

    def __init__(self, programs: list[Program], points: list[Point], repeats: int, limits: Limits, measure: Measure, say: Say,
                 after: Callable[[Point, Samples], None]) -> None:
        self.programs, self.points, self.repeats, self.limits = programs, points, repeats, limits
        self._measure, self._say, self._after = measure, say, after
        self._seconds: dict[tuple[str, Point], float] = {}
        self._stopped: dict[str, Point] = {}
        self._gave_up: set[tuple[str, Point]] = set()
        self._began = time.monotonic()
        self.samples = Samples()

    def run(self) -> Samples:
        """`after` is called when all programs had their turn at a point."""
        n, total = 0, self.repeats * len(self.points) * len(self.programs)
        for number in range(self.repeats):
            for point in self.points:
                # Who comes second finds other caches and another clock, so the order changes from round to round.
                for program in self.programs[::-1 if number % 2 else 1]:
                    n += 1
                    if (program.name, point) not in self._gave_up:
                        self._turn(program, point, f"[{n}/{total}] {program.name}, {point}")
                self._after(point, self.samples)
        return self.samples

    def _turn(self, program: Program, point: Point, label: str) -> None:
        limit, name = self._limit()
        expected = self._expected(program, point)
        stopped = self._stopped.get(program.name)
        if limit is not None and limit <= 0:
            return self._skip(program, point, label, f"the time of {name} is over")
        if stopped is not None and _tokens(stopped) <= _tokens(point):
            return self._skip(program, point, label, f"{stopped} were too many already")
        if limit is not None and expected > limit:
            return self._skip(program, point, label, f"it would take {expected:.0f} s or more, and {name} leaves {limit:.0f} s")
        began = time.monotonic()
        try:
            result = self._measure(program, point, limit)
        except LimitError as error:
            self._stopped[program.name] = point
            return self._skip(program, point, label, f"it {error}, which is what {name} left")
        except MeasureError as error:
            if program.name == OURS and not self.samples.runs:
                raise  # peers alone are not what was asked for
            return self._skip(program, point, label, str(error))
        self._seconds[program.name, point] = seconds = time.monotonic() - began
        self.samples.runs[program.name, point].append(result)
        prefill = "" if result["prefill"] is None else f"prefill {result['prefill']:.1f} tok/s, "
        self._say(f"{label}: {prefill}decode {result['decode']:.1f} tok/s, {seconds:.1f} s")

    def _limit(self) -> tuple[float | None, str]:
        """Seconds the next measurement may take, and the option that says so."""
        one, everything = self.limits.one, self.limits.all
        left = None if everything is None else everything - (time.monotonic() - self._began)
        if left is not None and (one is None or left < one):
            return left, "--budget"
        return one, "--limit"

    def _expected(self, program: Program, point: Point) -> float:
        """Seconds, at least: as long as before, or longer than a smaller point in proportion to its tokens."""
        if (program.name, point) in self._seconds:
            return self._seconds[program.name, point]
        smaller = [(seconds, _tokens(other)) for (name, other), seconds in self._seconds.items() if name == program.name]
        # Starting a program takes the same time at every depth; only what is beyond the fastest measurement grows.
        base = min((seconds for seconds, _ in smaller), default=0.0)
        return max((base + (seconds - base) * _tokens(point) / n for seconds, n in smaller if n <= _tokens(point)), default=0.0)

    def _skip(self, program: Program, point: Point, label: str, reason: str) -> None:
        self._gave_up.add((program.name, point))
        self.samples.skipped.append({"program": program.name, "depth": point.depth, "batch": point.batch, "reason": reason})
        self._say(f"{label}: left out: {reason}")


def _tokens(point: Point) -> int:
    return point.depth * point.batch


def failed_entirely(samples: Samples) -> str | None:
    """Why our own program was never measured; None if it was."""
    if any(runs for (name, _), runs in samples.runs.items() if name == OURS):
        return None
    return next((one["reason"] for one in samples.skipped if one["program"] == OURS), None)
