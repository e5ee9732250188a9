# SPDX-License-Identifier: Apache-2.0
"""Sessions to measure, inside a measuring process: how they come about, and how they decode."""
from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

from .. import progress
from ..eval.forced import bytes_per_token
from ..model import Model
from ..profile import as_profile
from ..session import Session
from ..stream import Stream

_SHARED = 8
"""Sessions of a batch share what was computed for the first of them where that is at most one part in so many."""


@contextlib.contextmanager
def bar(job: dict[str, Any], label: str, unit: str) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar where whoever asked has a terminal: job["screen"]."""
    if job["screen"] is None:
        yield None
        return
    with open(job["screen"], "w", closefd=False) as screen, progress.bar(label, unit, screen) as shown:
        yield shown


def part(shown: Callable[[int, int], None] | None, i: int, n: int) -> Callable[[int, int], None] | None:
    """Part i of n of the same size."""
    return shown and (lambda done, total: shown(i * total + done, n * total))


class Clock:
    """Seconds inside a `with` block."""

    def __enter__(self) -> Clock:
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._began


def opened(model: Model, job: dict[str, Any], options: dict[str, Any]) -> tuple[list[Session], dict[str, Any]]:
    """One session for each prompt of the job, filled to its depth; and what that took."""
    return _restored(model, job, options) if job["restore"] else _computed(model, job, options)


def _computed(model: Model, job: dict[str, Any], options: dict[str, Any]) -> tuple[list[Session], dict[str, Any]]:
    prompts, filled = job["prompts"], job["fill"]
    own = prompts if _SHARED * len(prompts[0]) > job["depth"] else prompts[:1]
    sessions, before = [model.session(**options) for _ in own], model.stats()
    with bar(job, "computing", "tok") as shown, Clock() as prefill:
        for i, (session, prompt) in enumerate(zip(sessions, own, strict=True)):
            session.append(prompt)
            session.prefill(part(shown, i, len(sessions)))
    after = model.stats()
    sessions += [sessions[0].fork() for _ in prompts[len(own):]]
    with bar(job, "filling", "tok") as shown, Clock() as fill:
        for seed, session in enumerate(sessions):
            if filled:
                session.fill(filled, seed, part(shown, seed, len(sessions)))
    rate = len(prompts) * filled / fill.seconds if filled else None
    return sessions, {
        "prefill_seconds": prefill.seconds, "computed_tokens": sum(map(len, own)), "fill_tokens_per_second": rate,
        "prefill_shares": {work: (getattr(after, f"{work}_ns") - getattr(before, f"{work}_ns")) / 1e9 / prefill.seconds
                           for work in ("attend", "select", "seal", "cluster")},
    }


def _restored(model: Model, job: dict[str, Any], options: dict[str, Any]) -> tuple[list[Session], dict[str, Any]]:
    n = len(job["prompts"])
    known = {name: options[name] for name in ("context", "beyond_trained") if name in options}  # the others are those it was saved with
    with bar(job, "restoring", "B") as shown, Clock() as clock:
        sessions = [model.restore(job["restore"], **known, progress=part(shown, i, n)) for i in range(n)]
    return sessions, {"prefill_seconds": None, "computed_tokens": 0, "restore_seconds": clock.seconds}


def bytes_read(session: Session) -> float | None:
    """Key, value and index bytes that the last token read, about; None if it was computed densely."""
    stats, profile = session.stats(), session.model.profile
    if not stats.sparse_rows or isinstance(profile, int):
        return None
    return bytes_per_token(session, stats.attended_tokens, as_profile(profile))


def plain(stats: Any) -> dict[str, Any]:
    """For JSON, which has no NaN."""
    return {name: None if value != value else value for name, value in dataclasses.asdict(stats).items()}


def warm_up(model: Model, ids: list[int], options: dict[str, Any]) -> None:
    with model.session(**options) as session:
        session.append(ids)
        session.generate(max_tokens=2, ignore_eos=True)


@dataclasses.dataclass(frozen=True)
class Decoded:
    """Seconds."""

    first: float
    """Of the first step, which reads what was not read before."""
    steps: list[float]
    """Of each step behind it."""
    attention: list[float]
    """Of that, on attention: selecting and attending."""
    selecting: list[float]
    waited: float
    """In these steps for pages, in all."""


def decode(model: Model, sessions: list[Session], steps: int, options: dict[str, Any]) -> Decoded:
    """One step, and `steps` more."""
    streams = [session.generate(stream=True, max_tokens=steps + 1, ignore_eos=True, **options) for session in sessions]
    with Clock() as first:
        _advance(streams, 1)
    seconds, stats = [], [model.stats()]
    for step in range(steps):
        with Clock() as clock:
            _advance(streams, step + 2)
        seconds.append(clock.seconds)
        stats.append(model.stats())
    for stream in streams:
        stream.close()
    attending, selecting = ([(getattr(after, name) - getattr(before, name)) / 1e9 for before, after in itertools.pairwise(stats)]
                            for name in ("attend_ns", "select_ns"))
    attention = [sum(parts) for parts in zip(attending, selecting, strict=True)]
    return Decoded(first.seconds, seconds, attention, selecting, (stats[-1].cold_wait_ns - stats[0].cold_wait_ns) / 1e9)


def p99(seconds: list[float]) -> float:
    """What one in a hundred reaches."""
    return sorted(seconds)[min(len(seconds) - 1, round(0.99 * len(seconds)))]


def _advance(streams: list[Stream], n_tokens: int) -> None:
    """The engine computes a step for all sessions when the first of them asks; the others find their token ready."""
    while any(len(stream.tokens) < n_tokens for stream in streams):
        for stream in streams:
            if len(stream.tokens) < n_tokens:
                stream.step()
