# SPDX-License-Identifier: Apache-2.0
"""Checked reading of safetensors files, row ranges as float32, FP8 weights with their scales included."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .errors import ConvertError
from .files import RangeFile, parse_json_object
from .tensors import Tensor

_MAX_HEADER = 100_000_000  # the format's own limit
_DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A tensor as the header states it, checked against the file."""

    file: RangeFile
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    size: int


def read_entries(file: RangeFile) -> dict[str, Entry]:
    """All tensors of a file. Refused: anything by which the header and the file disagree."""
    header, start = _read_header(file)
    entries = {}
    for name, info in header.items():
        if name != "__metadata__":
            entries[name] = _entry(file, name, info, start)
    end, before = start, "the header"
    for entry in sorted(entries.values(), key=lambda e: (e.offset, e.size)):
        if entry.offset != end:
            relation = "overlaps" if entry.offset < end else "leaves a gap after"
            raise ConvertError(f"{file.shown}: tensor {entry.name} {relation} {before}")
        end, before = entry.offset + entry.size, f"tensor {entry.name}"
    if end != file.size:
        raise ConvertError(f"{file.shown}: {file.size - end} bytes follow the last tensor")
    return entries


def _read_header(file: RangeFile) -> tuple[dict, int]:
    if file.size < 8:
        raise ConvertError(f"{file.shown} has only {file.size} bytes, too few for a safetensors file")
    length = int.from_bytes(file.read(0, 8).tobytes(), "little")
    if length > file.size - 8:
        raise ConvertError(
            f"{file.shown}: the header claims {length} bytes, but the file has {file.size}; it is cut short or not a safetensors file"
        )
    if not 2 <= length <= _MAX_HEADER:
        raise ConvertError(f"{file.shown}: a header of {length} bytes is not possible")
    try:
        text = file.read(8, length).tobytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConvertError(f"{file.shown}: the header is not valid JSON: {error}") from error
    return parse_json_object(text, f"{file.shown}: the header", lambda pairs: _unique(pairs, file)), 8 + length


def _unique(pairs: list, file: RangeFile) -> dict:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ConvertError(f"{file.shown}: {twice} occurs twice in the header")
    return result


def _entry(file: RangeFile, name: str, info: object, start: int) -> Entry:
    where = f"{file.shown}: tensor {name}"
    if not isinstance(info, dict):
        raise ConvertError(f"{where} is not described by an object")
    dtype, shape, offsets = info.get("dtype"), info.get("shape"), info.get("data_offsets")
    if not _whole_numbers(shape) or not _whole_numbers(offsets) or len(offsets) != 2:
        raise ConvertError(f"{where} has no valid shape and data_offsets")
    if dtype not in _DTYPE_BYTES:
        raise ConvertError(f"{where} has the unknown dtype {dtype!r}")
    size, (begin, end) = math.prod(shape) * _DTYPE_BYTES[dtype], offsets
    if end - begin != size:
        raise ConvertError(f"{where} has shape {shape} of {dtype}, {size} bytes, but a range of {end - begin} bytes")
    if start + end > file.size:
        raise ConvertError(f"{where} ends at byte {start + end}, but the file has {file.size}")
    return Entry(file, name, dtype, tuple(shape), start + begin, size)


def _whole_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


# ---- tensors ----------------------------------------------------------------------------------------------------


def tensor(entry: Entry, scale: Entry | None, block: tuple[int, int]) -> Tensor:
    """The values of an entry. scale: the companion of an FP8 weight; block: the size of its scale blocks."""
    where = f"{entry.file.shown}: tensor {entry.name}"
    if entry.dtype == "F8_E4M3":
        if scale is None:
            raise ConvertError(f"{where} is FP8 without a scale ({entry.name}_scale_inv or {entry.name}_scale)")
        return Fp8Tensor(entry, _Scale(entry, scale, block))
    if entry.dtype not in ("F32", "F16", "BF16"):
        raise ConvertError(f"{where} has dtype {entry.dtype}, which is not supported (supported: F32, F16, BF16, F8_E4M3)")
    return FloatTensor(entry)


def _read_rows(entry: Entry, start: int, stop: int, dtype: str) -> np.ndarray:
    """Rows of an entry; a vector is one row."""
    shape = entry.shape if len(entry.shape) == 2 else (1, math.prod(entry.shape))
    width = shape[1] * np.dtype(dtype).itemsize
    return entry.file.read(entry.offset + start * width, (stop - start) * width).view(dtype).reshape(stop - start, shape[1])


def _widen(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32, copy=False)


_STORAGE = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class FloatTensor(Tensor):
    def __init__(self, entry: Entry):
        super().__init__(entry.name, entry.shape, 8 * _DTYPE_BYTES[entry.dtype])
        self._entry = entry

    def rows(self, start: int, stop: int) -> np.ndarray:
        return _widen(_read_rows(self._entry, start, stop, _STORAGE[self._entry.dtype]), self._entry.dtype)


class _Scale:
    """Scales of an FP8 weight: one for all, one per row, or one per block of a grid whose last blocks may be ragged."""

    def __init__(self, weight: Entry, scale: Entry, block: tuple[int, int]):
        if scale.dtype not in _STORAGE:
            raise ConvertError(f"{scale.file.shown}: tensor {scale.name} has dtype {scale.dtype}, not a supported one for scales")
        if len(weight.shape) != 2:
            raise ConvertError(
                f"{weight.file.shown}: tensor {weight.name} is FP8 with {len(weight.shape)} dimensions; only matrices are supported"
            )
        values = _widen(_read_rows(scale, 0, scale.shape[0] if len(scale.shape) == 2 else 1, _STORAGE[scale.dtype]), scale.dtype)
        if not np.isfinite(values).all():
            raise ConvertError(f"{scale.file.shown}: tensor {scale.name} holds NaN or infinity")
        n, k = weight.shape
        grid = (-(-n // block[0]), -(-k // block[1]))
        if math.prod(scale.shape) == 1:
            self._values, self._block = values.reshape(1, 1), (n, k)
        elif scale.shape == grid:
            self._values, self._block = values, block
        elif scale.shape in ((n, 1), (n,)):
            self._values, self._block = values.reshape(n, 1), (1, k)
        else:
            needed = f"{list(weight.shape)} in blocks of {list(block)} needs {list(grid)}"
            raise ConvertError(f"{scale.file.shown}: tensor {scale.name} has shape {list(scale.shape)}, but {needed}")
        self._columns = np.arange(k) // self._block[1]

    def apply(self, values: np.ndarray, start: int) -> np.ndarray:
        rows = np.arange(start, start + len(values)) // self._block[0]
        return values * self._values[rows][:, self._columns]


def _e4m3_values() -> np.ndarray:
    """All 256 values: exponent bias 7, no infinities, 0x7F and 0xFF are NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value[(code & 127) == 127] = np.nan
    return np.where(code & 128, -value, value).astype(np.float32)


_E4M3 = _e4m3_values()


class Fp8Tensor(Tensor):
    def __init__(self, entry: Entry, scale: _Scale):
        super().__init__(entry.name, entry.shape, 8)
        self._entry, self._scale = entry, scale

    def rows(self, start: int, stop: int) -> np.ndarray:
        with np.errstate(over="ignore"):  # what overflows is refused by name when it is encoded
            return self._scale.apply(_E4M3[_read_rows(self._entry, start, stop, "u1")], start)
