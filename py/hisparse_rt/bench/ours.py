# SPDX-License-Identifier: Apache-2.0
"""Measures this package: `python -m hisparse_rt.bench.ours`, which answers as peers/protocol.py says."""
from __future__ import annotations

import dataclasses
import resource
import time
from typing import Any

from .. import __version__
from ..load import load
from ..model import Model
from ..session import Session
from ..stream import Stream
from .peers.protocol import serve


def probe() -> dict[str, Any]:
    return {"version": f"hisparse_rt {__version__}"}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Options for `load`, `Model.session` and `Session.generate` are in the job under these names."""
    prompts, steps = job["prompts"], job["decode_tokens"]
    options = {"context": len(prompts[0]) + job["fill"] + steps + 1} | job["session"]
    with load(job["model"], threads=job["threads"], **job["engine"]) as model:
        _warm_up(model, job["warm_up"], options)
        sessions = [model.session(**options) for _ in prompts]
        began = time.perf_counter()
        for session, prompt in zip(sessions, prompts, strict=True):
            session.append(prompt)
            session.prefill()
        prefill = time.perf_counter() - began
        began = time.perf_counter()
        for seed, session in enumerate(sessions):
            if job["fill"]:
                session.fill(job["fill"], seed)
        fill = time.perf_counter() - began
        seconds = _decode(sessions, steps, job["generate"])
        stats = [session.stats() for session in sessions]
        return {
            "prefill": len(prompts) * len(prompts[0]) / prefill, "decode": len(prompts) * steps / sum(seconds),
            "kv": stats[0].kv_format, "kv_bytes": sum(one.kv_bytes for one in stats),
            "details": {
                "step_seconds_p99": sorted(seconds)[min(len(seconds) - 1, round(0.99 * len(seconds)))],
                "rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "fill_tokens_per_second": len(prompts) * job["fill"] / fill if job["fill"] else None,
                "session": _plain(stats[0]), "engine": _plain(model.stats()),
            },
        }


def _plain(stats: Any) -> dict[str, Any]:
    """For JSON, which has no NaN."""
    return {name: None if value != value else value for name, value in dataclasses.asdict(stats).items()}


def _warm_up(model: Model, ids: list[int], options: dict[str, Any]) -> None:
    with model.session(**options) as session:
        session.append(ids)
        session.generate(max_tokens=2, ignore_eos=True)


def _decode(sessions: list[Session], steps: int, options: dict[str, Any]) -> list[float]:
    """Seconds of each of `steps` steps, after one that is not counted."""
    streams = [session.generate(stream=True, max_tokens=steps + 1, ignore_eos=True, **options) for session in sessions]
    _advance(streams, 1)
    seconds = []
    for step in range(steps):
        began = time.perf_counter()
        _advance(streams, step + 2)
        seconds.append(time.perf_counter() - began)
    for stream in streams:
        stream.close()
    return seconds


def _advance(streams: list[Stream], n_tokens: int) -> None:
    """The engine computes a step for all sessions when the first of them asks; the others find their token ready."""
    while any(len(stream.tokens) < n_tokens for stream in streams):
        for stream in streams:
            if len(stream.tokens) < n_tokens:
                stream.step()


if __name__ == "__main__":
    serve(probe, measure)
