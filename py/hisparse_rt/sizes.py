# SPDX-License-Identifier: Apache-2.0
"""Byte sizes as people write them."""
from __future__ import annotations

import operator
import re

from .errors import InvalidError

_UNITS = {
    "": 1, "B": 1,
    "K": 1 << 10, "KIB": 1 << 10, "KB": 10**3,
    "M": 1 << 20, "MIB": 1 << 20, "MB": 10**6,
    "G": 1 << 30, "GIB": 1 << 30, "GB": 10**9,
    "T": 1 << 40, "TIB": 1 << 40, "TB": 10**12,
}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_size(value: int | str) -> int:
    """Bytes of `value`: an int, or a text such as "4GiB", "512M" (binary) or "1.5GB" (decimal). InvalidError if it is neither."""
    if isinstance(value, str):
        match = _FORM.fullmatch(value)
        unit = _UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None:
            raise InvalidError(f"{value!r} is not a size; write for example 4GiB, 512MiB or 1000000")
        size = int(match[1]) * unit if "." not in match[1] else int(float(match[1]) * unit)
    else:
        if isinstance(value, bool):
            raise InvalidError(f"{value!r} is not a size")
        try:
            size = operator.index(value)
        except TypeError:
            raise InvalidError(f"{value!r} is not a size; give bytes as an int or a text such as 4GiB") from None
    if not 0 <= size < 1 << 63:
        raise InvalidError(f"a size of {size} bytes is out of range")
    return size


def format_size(size: float) -> str:
    """`size` bytes for people: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
