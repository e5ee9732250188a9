# SPDX-License-Identifier: Apache-2.0
"""Progress bars: on stderr, and only where a person can see them."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def bar(label: str, unit: str, file: TextIO | None = None) -> Iterator[Callable[[int, int], None] | None]:
    """A function (done, total) that draws, or None when stderr, or `file` in its place, is no terminal. The bar vanishes at the end."""
    file = file or sys.stderr
    if file is None or not file.isatty():
        yield None
        return
    from tqdm import tqdm  # loaded only when something will be drawn

    with tqdm(desc=label, unit=unit, unit_scale=unit == "B", leave=False, delay=0.5, file=file) as display:

        def report(done: int, total: int) -> None:
            display.total = total
            display.update(done - display.n)
            if done >= total:
                display.close()  # before anything else is written

        yield report
