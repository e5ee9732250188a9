# SPDX-License-Identifier: Apache-2.0
"""The picture of a report. By itself, `python -m hisparse_rt.bench.plot REPORT.json PICTURE.svg` draws one made before."""
from __future__ import annotations

import json
import sys
from typing import Any, BinaryIO

from .. import picture
from .programs import OURS


def draw(report: dict[str, Any], name: str, file: BinaryIO) -> None:
    """Speed over depth, prefill on the left and decode on the right. The name says the format."""
    works = [(work, [row for row in report["rows"] if row["work"] == work and row["batch"] == 1]) for work in ("prefill", "decode")]
    with picture.drawn(name, file, 1, 2, size=(9, 3.6)) as (figure, axes):
        for axis, (work, found) in zip(axes, works, strict=True):
            _lines(axis, found, report)
            axis.set(title=work, xlabel="tokens in the session", ylabel="tokens per second", xscale="log", yscale="log", ylim=(1, None))
            depths = [row["depth"] for row in found]
            axis.set_xticks(depths, [f"{depth // 1024}K" if depth % 1024 == 0 else str(depth) for depth in depths])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        axes[0].legend(fontsize="small")
        figure.suptitle(f"{report['name']} {report['dtype']}, {report['isa']}, {report['threads']} threads", fontsize="medium")


def _lines(axis: Any, found: list[dict[str, Any]], report: dict[str, Any]) -> None:
    peers = {name: f"{name} ({facts['kv']} KV)" for name, facts in report["peers"].items()}
    kv = next((row["kv"] for row in found if row["kv"]), "?")
    lines = [(f"hisparse_rt ({kv} KV)", [row[OURS] for row in found], "-o")]
    lines += [(label, [row["peers"][name] for row in found], "-s") for name, label in peers.items()]
    lines += [("bound", [row["bound"] for row in found], ":k")]
    for label, values, style in lines:
        points = [(row["depth"], value) for row, value in zip(found, values, strict=True) if value]
        if points:
            axis.plot(*zip(*points, strict=True), style, label=label, markersize=4)


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        sys.exit("usage: python -m hisparse_rt.bench.plot REPORT.json PICTURE.svg")
    source, target = arguments
    picture.check(target)
    with open(source, encoding="utf-8") as text:
        report = json.load(text)
    with open(target, "wb") as file:
        draw(report, target, file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
