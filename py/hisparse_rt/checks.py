# SPDX-License-Identifier: Apache-2.0
"""Arguments that must be numbers, or names of files."""
from __future__ import annotations

import operator
import os
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
