# SPDX-License-Identifier: Apache-2.0
"""Arguments that must be numbers, or names of files, and what is in these."""
from __future__ import annotations

import operator
import os
import stat
from typing import Any

import numpy as np

from .errors import InvalidError


def integer(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an int from low to high. TypeError for bools and fractions, InvalidError outside the range."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer, not a bool")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None
    if not low <= number <= high:
        raise InvalidError(f"{name} is {number}, allowed are {low} to {high}")
    return number


def real(name: str, value: Any) -> float:
    """`value` as a float, NaN and infinities included: the library refuses those by name."""
    if isinstance(value, (bool, np.bool_, str, bytes)):
        raise TypeError(f"{name} must be a number, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise InvalidError(f"{name} is too large") from None
    except TypeError:
        raise TypeError(f"{name} must be a number, not {value!r}") from None


def milliseconds(name: str, seconds: Any) -> int:
    """`seconds` in milliseconds, as the library takes times: from 1 to 2^31 - 1."""
    number, most = real(name, seconds), ((1 << 31) - 1) / 1000
    if not 0.001 <= number <= most:
        raise InvalidError(f"{name} is {number:g} seconds, allowed are 0.001 to {most}")
    return round(number * 1000)


def file_name(path: Any) -> bytes:
    """`path` as the system takes it."""
    name = os.fsencode(path)
    if not name or b"\0" in name:
        raise InvalidError("the path has a NUL character in it" if name else "the path is empty")
    return name


def content(name: str | os.PathLike[str]) -> bytes:
    """All bytes of a file or pipe. InvalidError for a device: such as /dev/zero have no end. OSError."""
    with open(name, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)) and not file.isatty():
            raise InvalidError(f"{os.fspath(name)} is a device, not a file")
        return file.read()


def text_content(name: str | os.PathLike[str]) -> str:
    """`content` as text, which must be UTF-8."""
    try:
        return content(name).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidError(f"{os.fspath(name)} is not UTF-8 text: {error.reason} at byte {error.start}") from None
