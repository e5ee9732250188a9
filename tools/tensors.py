# SPDX-License-Identifier: Apache-2.0
"""Source tensors and what is made of them: everything is read by ranges of rows, so that no big tensor is ever held whole.

A Tensor answers `rows` (float32) and `encode` (the row arrays of a target dtype, see packing.py). Sources subclass it, and
override `encode` where their own storage converts without loss. Permuted, Stacked and Paired build new tensors out of
others by moving encoded rows, which needs no arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import packing
from .packing import Encoded


class Tensor:
    """A named tensor of one or two dimensions in a source."""

    def __init__(self, name: str, shape: tuple[int, ...], bits: float):
        self.name = name
        self.shape = shape
        self.bits = bits  # per weight in the source, which tells how much precision there is to keep

    def rows(self, start: int, stop: int) -> np.ndarray:
        raise NotImplementedError

    def encode(self, dtype: str, start: int, stop: int) -> Encoded:
        return packing.encode(self.rows(start, stop), dtype, self.name)

    def vector(self) -> np.ndarray:
        """All values of a one-dimensional tensor."""
        values = self.rows(0, 1).reshape(-1)
        packing.require_finite(values, self.name)
        return values


class Permuted(Tensor):
    """Rows in another order, within consecutive equal runs of rows (heads)."""

    def __init__(self, inner: Tensor, order: np.ndarray):
        super().__init__(inner.name, inner.shape, inner.bits)
        self._inner, self._order = inner, order

    def _pick(self, read: Callable[[int, int], Encoded], start: int, stop: int) -> Encoded:
        n = len(self._order)
        first, last = start // n * n, -(-stop // n) * n
        index = (np.arange(first, last).reshape(-1, n)[:, self._order]).reshape(-1)[start - first : stop - first] - first
        return tuple(array[index] for array in read(first, last))

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self._pick(lambda a, b: (self._inner.rows(a, b),), start, stop)[0]

    def encode(self, dtype: str, start: int, stop: int) -> Encoded:
        return self._pick(lambda a, b: self._inner.encode(dtype, a, b), start, stop)

    def vector(self) -> np.ndarray:
        return self._inner.vector().reshape(-1, len(self._order))[:, self._order].reshape(-1)


class Stacked(Tensor):
    """Tensors one below the other."""

    def __init__(self, parts: list[Tensor]):
        rows = sum(part.shape[0] for part in parts)
        super().__init__(parts[0].name, (rows, *parts[0].shape[1:]), max(part.bits for part in parts))
        self._parts = parts

    def encode(self, dtype: str, start: int, stop: int) -> Encoded:
        pieces, top = [], 0
        for part in self._parts:
            a, b = max(start - top, 0), min(stop - top, part.shape[0])
            if a < b:
                pieces.append(part.encode(dtype, a, b))
            top += part.shape[0]
        return tuple(np.concatenate(arrays) for arrays in zip(*pieces))

    def vector(self) -> np.ndarray:
        return np.concatenate([part.vector() for part in self._parts])


class Paired(Tensor):
    """Panels of two equal tensors in turn, both filled up with zero rows to whole panels. Ranges cover whole pairs."""

    def __init__(self, first: Tensor, second: Tensor):
        rows = 2 * packing.padded(first.shape[0], packing.PANEL)
        super().__init__(first.name, (rows, *first.shape[1:]), max(first.bits, second.bits))
        self._pair = (first, second)

    def encode(self, dtype: str, start: int, stop: int) -> Encoded:
        a, b = start // 2, stop // 2
        halves = [part.encode(dtype, a, min(b, part.shape[0])) for part in self._pair]
        return tuple(_alternate(x, y, b - a) for x, y in zip(*halves))

    def vector(self) -> np.ndarray:
        first, second = (part.vector().reshape(-1, 1) for part in self._pair)
        return _alternate(first, second, self.shape[0] // 2).reshape(-1)


def _alternate(first: np.ndarray, second: np.ndarray, n: int) -> np.ndarray:
    panels = [np.pad(x, ((0, n - len(x)), (0, 0))).reshape(-1, 1, packing.PANEL, x.shape[1]) for x in (first, second)]
    return np.concatenate(panels, axis=1).reshape(2 * n, first.shape[1])
