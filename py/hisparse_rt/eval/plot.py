# SPDX-License-Identifier: Apache-2.0
"""The picture of a curve: distance to dense attention against speed and against bytes, a line for each selector."""
from __future__ import annotations

from typing import Any, BinaryIO

from .. import picture

_LEAST = 1e-6  # of what a logarithmic axis shows; less is as good as none


def draw(result: dict[str, Any], name: str, file: BinaryIO) -> None:
    """Speed on the left, bytes on the right; the points of a line are its budgets. The name says the format."""
    selectors = list(dict.fromkeys(point["selector"] for point in result["points"]))
    costs = (("tokens per second", lambda point: 1 / point["seconds_per_token"]), ("MB read per token", _megabytes))
    with picture.drawn(name, file, 1, 2, size=(9, 3.6)) as (figure, axes):
        for axis, (label, cost) in zip(axes, costs, strict=True):
            for selector in selectors:
                points = sorted((point for point in result["points"] if point["selector"] == selector), key=lambda point: point["budget"])
                axis.plot([cost(point) for point in points], [max(point["kl_mean"], _LEAST) for point in points], "-o", label=selector,
                          markersize=4)
            axis.set(xlabel=label, ylabel="KL(dense || sparse)", yscale="log")
            axis.grid(alpha=0.3)
        axes[0].axvline(1 / result["dense"]["seconds_per_token"], linestyle=":", color="k", label="dense")
        axes[0].legend(fontsize="x-small")
        budgets = ", ".join(str(budget) for budget in sorted({point["budget"] for point in result["points"]}))
        figure.suptitle(f"budgets {budgets}; {result['tokens']} tokens after {', '.join(map(str, result['contexts']))}", fontsize="medium")


def _megabytes(point: dict[str, Any]) -> float:
    return float(point["bytes_read_per_token"]) / 1e6
