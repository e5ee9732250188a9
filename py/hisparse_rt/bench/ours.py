# SPDX-License-Identifier: Apache-2.0
"""Measures this package: `python -m hisparse_rt.bench.ours`, which answers as peers/protocol.py says."""
from __future__ import annotations

import contextlib
import dataclasses
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from .. import __version__, progress
from ..errors import HisparseError
from ..load import load
from ..model import Model
from ..session import Session
from ..stream import Stream
from .peers.protocol import serve


def probe() -> dict[str, Any]:
    return {"version": f"hisparse_rt {__version__}"}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Options for `load`, `Model.session` and `Session.generate` are in the job under these names."""
    options = {"context": job["depth"] + job["decode_tokens"] + 1} | job["session"]
    engine = {"max_sessions": max(256, len(job["prompts"]))} | job["engine"]
    with load(job["model"], threads=job["threads"], **engine) as model:
        _warm_up(model, job["warm_up"], options)
        make = _restore if job["restore"] else _compute
        sessions, details = make(model, job, options)
        if job["save"]:
            with _bar(job, "saving", "B") as bar, _Clock() as clock:
                sessions[0].save(job["save"], bar)
            details["save_seconds"] = clock.seconds
        first, seconds, waited = _decode(model, sessions, job["decode_tokens"], job["generate"])
        stats = [session.stats() for session in sessions]
        computed = len(sessions) * (job["depth"] - job["fill"])
        return {
            "prefill": computed / details["prefill_seconds"] if details["prefill_seconds"] else None,
            "decode": len(sessions) * job["decode_tokens"] / sum(seconds),
            "kv": stats[0].kv_format, "kv_bytes": sum(one.kv_bytes for one in stats),
            "details": details | {
                "first_step_seconds": first,
                "wait_share": waited / sum(seconds),
                "step_seconds_p99": sorted(seconds)[min(len(seconds) - 1, round(0.99 * len(seconds)))],
                "rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "session": _plain(stats[0]), "engine": _plain(model.stats()),
            },
        }


@contextlib.contextmanager
def _bar(job: dict[str, Any], label: str, unit: str) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar where whoever asked has a terminal: job["screen"]."""
    if job["screen"] is None:
        yield None
        return
    with open(job["screen"], "w", closefd=False) as screen, progress.bar(label, unit, screen) as bar:
        yield bar


def _part(bar: Callable[[int, int], None] | None, i: int, n: int) -> Callable[[int, int], None] | None:
    """Part i of n of the same size."""
    return bar and (lambda done, total: bar(i * total + done, n * total))


class _Clock:
    """Seconds inside a `with` block."""

    def __enter__(self) -> _Clock:
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._began


def _compute(model: Model, job: dict[str, Any], options: dict[str, Any]) -> tuple[list[Session], dict[str, Any]]:
    prompts = job["prompts"]
    sessions = [model.session(**options) for _ in prompts]
    with _bar(job, "computing", "tok") as bar, _Clock() as prefill:
        for i, (session, prompt) in enumerate(zip(sessions, prompts, strict=True)):
            session.append(prompt)
            session.prefill(_part(bar, i, len(sessions)))
    with _bar(job, "filling", "tok") as bar, _Clock() as fill:
        for seed, session in enumerate(sessions):
            if job["fill"]:
                session.fill(job["fill"], seed, _part(bar, seed, len(sessions)))
    rate = len(prompts) * job["fill"] / fill.seconds if job["fill"] else None
    return sessions, {"prefill_seconds": prefill.seconds, "fill_tokens_per_second": rate}


def _restore(model: Model, job: dict[str, Any], options: dict[str, Any]) -> tuple[list[Session], dict[str, Any]]:
    n = len(job["prompts"])
    with _bar(job, "restoring", "B") as bar, _Clock() as clock:
        sessions = [model.restore(job["restore"], **options, progress=_part(bar, i, n)) for i in range(n)]
    return sessions, {"prefill_seconds": None, "restore_seconds": clock.seconds}


def _plain(stats: Any) -> dict[str, Any]:
    """For JSON, which has no NaN."""
    return {name: None if value != value else value for name, value in dataclasses.asdict(stats).items()}


def _warm_up(model: Model, ids: list[int], options: dict[str, Any]) -> None:
    with model.session(**options) as session:
        session.append(ids)
        session.generate(max_tokens=2, ignore_eos=True)


def _decode(model: Model, sessions: list[Session], steps: int, options: dict[str, Any]) -> tuple[float, list[float], float]:
    """Seconds of the first step, which reads what was never read before; of each of `steps` more; and of waiting for pages in these."""
    streams = [session.generate(stream=True, max_tokens=steps + 1, ignore_eos=True, **options) for session in sessions]
    seconds, waited = [], 0
    for step in range(steps + 1):
        with _Clock() as clock:
            _advance(streams, step + 1)
        seconds.append(clock.seconds)
        waited = waited if step else model.stats().cold_wait_ns
    waited = model.stats().cold_wait_ns - waited
    for stream in streams:
        stream.close()
    return seconds[0], seconds[1:], waited / 1e9


def _advance(streams: list[Stream], n_tokens: int) -> None:
    """The engine computes a step for all sessions when the first of them asks; the others find their token ready."""
    while any(len(stream.tokens) < n_tokens for stream in streams):
        for stream in streams:
            if len(stream.tokens) < n_tokens:
                stream.step()


if __name__ == "__main__":
    try:
        serve(probe, measure)
    except HisparseError as error:
        sys.exit(str(error))
