# SPDX-License-Identifier: Apache-2.0
"""From what decoded in turns to rows, and from rows to the table."""
from __future__ import annotations

import statistics
from typing import Any

from .distance import columns
from .report import lines
from .sessions import p99

Row = dict[str, Any]


def rows(answer: dict[str, Any], dtype: str) -> list[Row]:
    """One for each depth, profile and batch, beside the first profile of the same depth and the first depth of the same profile."""
    found = [_row(member, dtype) for member in answer["members"]]
    for row in found:
        beside = _first(found, depth=row["depth"], batch=row["batch"])
        shallow = _first(found, profile=row["profile"], batch=row["batch"])
        row["speed_ratio"] = beside["median_ms"] / row["median_ms"]
        row["time_ratio"] = row["median_ms"] / shallow["median_ms"]
        row["mean_time_ratio"] = row["mean_ms"] / shallow["mean_ms"]
        row["attention_ratio"] = beside["attention_ms"] / row["attention_ms"]
    return found


def _first(found: list[Row], **alike: Any) -> Row:
    return next(row for row in found if all(row[key] == value for key, value in alike.items()))


def _row(member: dict[str, Any], dtype: str) -> Row:
    seconds = _all(member, "steps")
    median, attention, selecting = (1e3 * statistics.median(_all(member, name)) for name in ("steps", "attention", "selecting"))
    return {
        "work": "decode", "depth": member["depth"], "batch": member["batch"], "profile": member["profile"], "dtype": dtype,
        "kv": member["kv"], "ours": 1e3 * member["batch"] / median, "steps": len(seconds), "median_ms": median,
        "mean_ms": 1e3 * statistics.fmean(seconds), "p99_ms": 1e3 * p99(seconds),
        "first_ms": 1e3 * statistics.median(turn["first"] for turn in member["turns"]),
        "attention_ms": attention, "select_ms": selecting, "attention_share": attention / median, "select_share": selecting / median,
        "wait_share": sum(turn["waited"] for turn in member["turns"]) / sum(seconds),
        "runs": [1e3 * statistics.median(turn["steps"]) for turn in member["turns"]], "session": member["session"],
    }


def _all(member: dict[str, Any], name: str) -> list[float]:
    return [second for turn in member["turns"] for second in turn[name]]


def table(found: list[Row]) -> str:
    """The rows for people; milliseconds are those of a step."""
    profile, depth = found[0]["profile"], found[0]["depth"]
    heads = ["profile", "depth", "sessions", "median ms", "mean", "p99", "tok/s", f"speed/{profile}", f"time/{depth}",
             "attention ms", f"attention/{profile}", "selecting"]
    cells = [[
        row["profile"], str(row["depth"]), str(row["batch"]), *(f"{row[name]:.2f}" for name in ("median_ms", "mean_ms", "p99_ms")),
        f"{row['ours']:.1f}", f"{row['speed_ratio']:.2f}x", f"{row['time_ratio']:.2f}x", f"{row['attention_ms']:.2f}",
        f"{row['attention_ratio']:.2f}x", f"{100 * row['select_share']:.0f} %",
    ] for row in found]
    return lines(columns([heads, *cells], found))
