# SPDX-License-Identifier: Apache-2.0
"""Pictures of reports, drawn with matplotlib, which nothing else needs: the same report gives the same file."""
from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from .errors import InvalidError

FORMATS = ("svg", "png", "pdf")


def check(name: str) -> None:
    """InvalidError if this cannot be drawn; told before anything is measured."""
    if _format(name) not in FORMATS:
        raise InvalidError(f"{name}: a picture is one of " + ", ".join(f".{one}" for one in FORMATS))
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidError("a picture needs matplotlib: pip install 'hisparse_rt[bench]'")


def _format(name: str) -> str:
    return os.path.splitext(name)[1].lower().removeprefix(".")


@contextlib.contextmanager
def drawn(name: str, file: BinaryIO, *subplots: int, size: tuple[float, float]) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes to draw on, written to `file` at the end. The name says the format."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "hisparse_rt"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(*subplots, figsize=size, layout="constrained")
    try:
        yield figure, axes
        figure.savefig(file, format=_format(name), metadata={"Date": None} if _format(name) == "svg" else None)
    finally:
        pyplot.close(figure)
