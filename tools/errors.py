# SPDX-License-Identifier: Apache-2.0
"""The converter's one exception, and how names are shown in its texts."""

from __future__ import annotations

import os
from collections.abc import Iterable

_LISTED = 8


class ConvertError(ValueError):
    """The source cannot be converted; the text names the file, tensor, option or number at fault."""


def shown(path: str | bytes | os.PathLike) -> str:
    """A path as valid UTF-8: bytes that are not text become replacement marks."""
    return os.fsencode(path).decode("utf-8", "replace")


def listed(names: Iterable[str]) -> str:
    """Names for a message, cut short when there are many."""
    names = sorted(names, key=_natural)
    text = ", ".join(names[:_LISTED])
    return f"{text} and {len(names) - _LISTED} more" if len(names) > _LISTED else text


def _natural(name: str) -> list:
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]
