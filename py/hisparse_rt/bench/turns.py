# SPDX-License-Identifier: Apache-2.0
"""Sessions of several depths under several profiles, all open at once, that decode in turns: inside a measuring process.

What the machine does meanwhile falls on all of them, and profiles are compared on the very same keys and values.
"""
from __future__ import annotations

import resource
from dataclasses import asdict, dataclass, field
from typing import Any

from ..load import load
from ..model import Model
from ..session import Session
from .sessions import bar, decode, opened, plain, warm_up


@dataclass
class Member:
    """What has a turn in each round: `batch` sessions of a depth that decode together under a profile."""

    depth: int
    batch: int
    profile: str
    sessions: list[Session]
    turns: list[dict[str, Any]] = field(default_factory=list)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """job["turns"]: the number of rounds, profiles, sizes of batches; job["places"]: jobs of one depth each."""
    wanted, places = job["turns"], job["places"]
    room = wanted["rounds"] * (job["decode_tokens"] + 1) + 1
    n_sessions = len(places) * len(wanted["profiles"]) * sum(wanted["batches"])
    with load(job["model"], threads=job["threads"], **{"max_sessions": max(256, n_sessions + 1)} | job["engine"]) as model:
        warm_up(model, job["warm_up"], {"context": len(job["warm_up"]) + 2} | job["session"])
        members, made = [], []
        for place in places:
            sessions, details = opened(model, place | {"screen": job["screen"]}, {"context": place["depth"] + room} | job["session"])
            made.append({"depth": place["depth"]} | details)
            members += _members(place["depth"], sessions, wanted)
        _take_turns(model, job, members)
        return {
            "members": [_told(member) for member in members], "opened": made, "engine": plain(model.stats()),
            "rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


def _members(depth: int, sessions: list[Session], wanted: dict[str, Any]) -> list[Member]:
    """Forks of the sessions, which share all that is not decoded, for every profile and size of a batch; the last has the sessions."""
    kinds = [(profile, batch) for profile in wanted["profiles"] for batch in sorted(wanted["batches"])]
    found = [Member(depth, batch, profile, [session.fork() for session in sessions[:batch]]) for profile, batch in kinds[:-1]]
    profile, batch = kinds[-1]
    found.append(Member(depth, batch, profile, sessions))
    for member in found:
        for session in member.sessions:
            session.set_profile(member.profile)
    return found


def _take_turns(model: Model, job: dict[str, Any], members: list[Member]) -> None:
    rounds = job["turns"]["rounds"]
    with bar(job, "decoding", "turn") as shown:
        for number in range(rounds):
            # Who comes second finds other caches, so the order changes from round to round.
            for i, member in enumerate(members[::-1 if number % 2 else 1]):
                member.turns.append(asdict(decode(model, member.sessions, job["decode_tokens"], job["generate"])))
                if shown is not None:
                    shown(number * len(members) + i + 1, rounds * len(members))


def _told(member: Member) -> dict[str, Any]:
    stats = member.sessions[0].stats()
    return {
        "depth": member.depth, "batch": member.batch, "profile": member.profile, "turns": member.turns, "kv": stats.kv_format,
        "session": plain(stats),
    }
