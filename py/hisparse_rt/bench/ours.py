# SPDX-License-Identifier: Apache-2.0
"""Measures this package: `python -m hisparse_rt.bench.ours`, which answers as peers/protocol.py says."""
from __future__ import annotations

import resource
import sys
from typing import Any

from .. import __version__
from ..errors import HisparseError
from ..load import load
from . import turns
from .peers.protocol import serve
from .sessions import Clock, bar, bytes_read, decode, opened, p99, plain, warm_up


def probe() -> dict[str, Any]:
    return {"version": f"hisparse_rt {__version__}"}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Sessions of one depth, or of several with job["turns"].

    Options for `load`, `Model.session` and `Session.generate` are in the job under these names.
    """
    if "turns" in job:
        return turns.measure(job)
    options = {"context": job["depth"] + job["decode_tokens"] + 1} | job["session"]
    engine = {"max_sessions": max(256, len(job["prompts"]))} | job["engine"]
    with load(job["model"], threads=job["threads"], **engine) as model:
        warm_up(model, job["warm_up"], options)
        sessions, details = opened(model, job, options)
        if job["save"]:
            with bar(job, "saving", "B") as shown, Clock() as clock:
                sessions[0].save(job["save"], shown)
            details["save_seconds"] = clock.seconds
        done = decode(model, sessions, job["decode_tokens"], job["generate"])
        stats = [session.stats() for session in sessions]
        return {
            "prefill": details["computed_tokens"] / details["prefill_seconds"] if details["prefill_seconds"] else None,
            "decode": len(sessions) * job["decode_tokens"] / sum(done.steps),
            "kv": stats[0].kv_format, "kv_bytes": sum(one.kv_bytes for one in stats), "bytes_read": bytes_read(sessions[0]),
            "details": details | {
                "first_step_seconds": done.first,
                "wait_share": done.waited / sum(done.steps),
                "attention_share": sum(done.attention) / sum(done.steps), "select_share": sum(done.selecting) / sum(done.steps),
                "step_seconds_p99": p99(done.steps),
                "rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "session": plain(stats[0]), "engine": plain(model.stats()),
            },
        }


if __name__ == "__main__":
    try:
        serve(probe, measure)
    except HisparseError as error:
        sys.exit(str(error))
