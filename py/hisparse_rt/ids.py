# SPDX-License-Identifier: Apache-2.0
"""Token ids as the library takes them."""
from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import TokenError

Ids: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]


def as_ids(value: Any) -> npt.NDArray[np.int32]:
    """`value` as a contiguous int32 array. Takes ints of any kind and one-dimensional integer arrays.

    TypeError for bools, floats, text and nested lists: a float that looks like an id is a mistake worth hearing about.
    TokenError for a number that no vocabulary can hold. The library itself checks the model's vocabulary.
    """
    if isinstance(value, (str, bytes)) or value is None:
        raise TypeError(f"token ids must be integers, not {type(value).__name__}")
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise TypeError(f"token ids must be a one-dimensional integer array, not {array.ndim}-dimensional {array.dtype}")
    else:
        array = _from_sequence(value)
    if array.size:
        bad = np.flatnonzero((array < 0) | (array > np.iinfo(np.int32).max))
        if bad.size:
            raise TokenError(f"token id {array[bad[0]]} at position {bad[0]} is outside every vocabulary")
    return np.ascontiguousarray(array, dtype=np.int32)


def _from_sequence(value: Any) -> npt.NDArray[Any]:
    if not isinstance(value, Iterable):
        raise TypeError(f"token ids must be a list of integers, not {type(value).__name__}")
    numbers: list[int] = []
    for position, item in enumerate(value):
        if isinstance(item, (bool, np.bool_)):
            raise TypeError(f"token id at position {position} is a bool")
        try:
            numbers.append(operator.index(item))
        except TypeError:
            raise TypeError(f"token id at position {position} is {item!r}, not an integer") from None
        if not 0 <= numbers[-1] < 1 << 31:
            raise TokenError(f"token id {numbers[-1]} at position {position} is outside every vocabulary")
    return np.array(numbers, dtype=np.int32)
