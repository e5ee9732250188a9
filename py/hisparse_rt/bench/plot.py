# SPDX-License-Identifier: Apache-2.0
"""The picture of a report. By itself, `python -m hisparse_rt.bench.plot REPORT.json PICTURE.svg` draws one made before."""
from __future__ import annotations

import importlib.util
import json
import os
import sys
from typing import Any, BinaryIO

from ..errors import InvalidError
from .programs import OURS

FORMATS = ("svg", "png", "pdf")


def check(name: str) -> None:
    """InvalidError if this cannot be drawn; told before anything is measured."""
    if _format(name) not in FORMATS:
        raise InvalidError(f"{name}: a picture is one of " + ", ".join(f".{one}" for one in FORMATS))
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidError("a picture needs matplotlib: pip install 'hisparse_rt[bench]'")


def _format(name: str) -> str:
    return os.path.splitext(name)[1].lower().removeprefix(".")


def draw(report: dict[str, Any], name: str, file: BinaryIO) -> None:
    """Speed over depth, prefill on the left and decode on the right. The name says the format."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "hisparse_rt"  # the same report gives the same file
    from matplotlib import pyplot

    works = [(work, [row for row in report["rows"] if row["work"] == work and row["batch"] == 1]) for work in ("prefill", "decode")]
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, (work, found) in zip(axes, works, strict=True):
        _lines(axis, found, report)
        axis.set(title=work, xlabel="tokens in the session", ylabel="tokens per second", xscale="log", yscale="log", ylim=(1, None))
        depths = [row["depth"] for row in found]
        axis.set_xticks(depths, [f"{depth // 1024}K" if depth % 1024 == 0 else str(depth) for depth in depths])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.suptitle(f"{report['name']} {report['dtype']}, {report['isa']}, {report['threads']} threads", fontsize="medium")
    figure.savefig(file, format=_format(name), metadata={"Date": None} if _format(name) == "svg" else None)
    pyplot.close(figure)


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
    check(target)
    with open(source, encoding="utf-8") as text:
        report = json.load(text)
    with open(target, "wb") as picture:
        draw(report, target, picture)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
