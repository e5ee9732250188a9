# SPDX-License-Identifier: Apache-2.0
"""From samples to rows, and from rows to the table. Speeds are tokens per second."""
from __future__ import annotations

import statistics
from typing import Any

from .bounds import Shape, decode_bytes, kv_bytes, prefill_operations
from .ceilings import Ceilings
from .distance import columns
from .job import Options, Point
from .programs import OURS
from .rounds import Samples

Row = dict[str, Any]


def step_bytes(shape: Shape, samples: Samples, point: Point, options: Options) -> int | None:
    """Bytes that a decoding step reads in the middle of the decoded tokens; None if ours was not measured there."""
    runs = samples.runs.get((OURS, point))
    if not runs:
        return None
    if runs[-1].get("bytes_read") is not None:  # sparse: what was attended, and what choosing that looked at
        return round(decode_bytes(shape, runs[-1]["bytes_read"], point.batch))
    held = runs[-1].get("kv_bytes", 0) / point.batch
    kv = kv_bytes(shape, runs[-1]["kv"], point.depth + (options.decode_tokens + 1) / 2, held)
    return round(decode_bytes(shape, kv, point.batch))


def rows(shape: Shape, samples: Samples, points: list[Point], peers: list[str], options: Options, ceilings: Ceilings | None) -> list[Row]:
    """One for prefill and one for decode at each depth; where sessions decode together, decode alone."""
    found = []
    for work in ("decode",) if options.fill or options.restore else ("prefill", "decode"):
        for point in points:
            if work == "decode" or point.batch == 1:
                found.append(_row(work, point, shape, samples, peers, _bound(work, point, shape, samples, options, ceilings)))
    return found


def _bound(work: str, point: Point, shape: Shape, samples: Samples, options: Options, ceilings: Ceilings | None) -> float | None:
    if ceilings is None:
        return None
    if work == "prefill":
        operations = ceilings.operations_per_second
        return None if operations is None else operations / prefill_operations(shape, point.depth)
    n_bytes = step_bytes(shape, samples, point, options)
    rate = None if n_bytes is None else ceilings.bytes_per_second(n_bytes)
    return None if n_bytes is None or rate is None else point.batch * rate / n_bytes


def _row(work: str, point: Point, shape: Shape, samples: Samples, peers: list[str], bound: float | None) -> Row:
    runs = {name: [run[work] for run in samples.runs.get((name, point), ())] for name in (OURS, *peers)}
    medians = {name: statistics.median(values) if values else None for name, values in runs.items()}
    mine, best = medians[OURS], max((medians[name] or 0.0 for name in peers), default=0.0)
    ours = samples.runs.get((OURS, point))
    return {
        "work": work, "depth": point.depth, "batch": point.batch, "dtype": shape.dtype, "kv": ours[-1]["kv"] if ours else None,
        "ours": mine, "peers": {name: medians[name] for name in peers}, "ratio": mine / best if mine and best else None,
        "bound": bound, "of_bound": mine / bound if mine and bound else None, "runs": runs,
        "details": ours[-1].get("details") if ours else None,
    }


def table(found: list[Row], kv_of_peers: dict[str, str]) -> str:
    """The rows for people. `kv_of_peers` has the peers in the order of the columns."""
    heads = ["work", "depth", "ours (kv)", *(f"{name} ({kv})" for name, kv in kv_of_peers.items()), *(["ratio"] if kv_of_peers else []),
             "bound", "of bound"]
    return lines(columns([heads] + [_cells(row, list(kv_of_peers)) for row in found], found))


def lines(cells: list[list[str]]) -> str:
    """Columns below their heads, the first to the left and the others to the right."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "".join("  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
                   .rstrip() + "\n" for line in cells)


def _cells(row: Row, peers: list[str]) -> list[str]:
    work = row["work"] if row["batch"] == 1 else f"{row['work']} x{row['batch']}"
    ours = f"{_speed(row['ours'])} ({row['kv'] or '-'})"
    ratio = [f"{row['ratio']:.2f}x" if row["ratio"] else "-"] if peers else []
    share = f"{100 * row['of_bound']:.0f} %" if row["of_bound"] else "-"
    return [work, str(row["depth"]), ours, *(_speed(row["peers"][name]) for name in peers), *ratio, _speed(row["bound"]), share]


def _speed(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"
