# SPDX-License-Identifier: Apache-2.0
"""Bounds-checked reading of a GGUF header. Every count, length, type and offset is checked against the file before it is
used, so a hostile file costs time and memory in proportion to its real size."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from .errors import ConvertError
from .files import RangeFile

_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1", 10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MAX_DIMS = 4
_MAX_ALIGNMENT = 1 << 20
_BUFFER = 1 << 20
_LEAST_KV = 8 + 4 + 1  # an empty key, a type, a one-byte value
_LEAST_TENSOR = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True)
class TensorInfo:
    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]  # rows first, the reverse of the order in the file
    offset: int  # from the start of the file
    size: int


@dataclass
class Header:
    version: int
    metadata: dict[str, Any] = field(default_factory=dict)  # numeric arrays are numpy arrays, string arrays are lists
    tensors: dict[str, TensorInfo] = field(default_factory=dict)


class _Cursor:
    """Reads forward through a file, refusing to pass its end."""

    def __init__(self, file: RangeFile):
        self.file, self.position = file, 0
        self._buffer, self._start = b"", 0

    def fail(self, text: str) -> ConvertError:
        return ConvertError(f"{self.file.shown}: {text}")

    def left(self) -> int:
        return self.file.size - self.position

    def take(self, size: int, what: str) -> bytes:
        if size > self.left():
            raise self.fail(f"{what} needs {size} bytes at offset {self.position}, but the file ends after {self.left()}")
        at = self.position - self._start
        if at + size > len(self._buffer):
            self._buffer = self.file.read(self.position, min(max(size, _BUFFER), self.left())).tobytes()
            self._start, at = self.position, 0
        self.position += size
        return self._buffer[at : at + size]

    def unpack(self, form: str, what: str) -> tuple:
        return struct.unpack(form, self.take(struct.calcsize(form), what))

    def string(self, what: str) -> str:
        (size,) = struct.unpack("<Q", self.take(8, what))
        raw = self.take(size, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8 text") from error


def read_header(file: RangeFile) -> Header:
    cursor = _Cursor(file)
    magic = cursor.take(4, "the magic number")
    if magic == b"FUGG":
        raise cursor.fail("a big-endian GGUF file is not supported")
    if magic != b"GGUF":
        raise cursor.fail("not a GGUF file")
    (version,) = cursor.unpack("<I", "the version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        raise cursor.fail("a big-endian GGUF file is not supported" if swapped in (1, 2, 3) else f"GGUF version {version} is not supported")
    n_tensors, n_keys = cursor.unpack("<QQ", "the counts")
    if n_tensors * _LEAST_TENSOR + n_keys * _LEAST_KV > cursor.left():
        raise cursor.fail(f"{n_tensors} tensors and {n_keys} keys do not fit the file of {file.size} bytes")
    header = Header(version)
    for _ in range(n_keys):
        _read_key(cursor, header.metadata)
    raw = [_read_tensor(cursor) for _ in range(n_tensors)]
    _place_tensors(cursor, header, raw)
    return header


def _read_key(cursor: _Cursor, metadata: dict[str, Any]) -> None:
    key = cursor.string("a key")
    if key in metadata:
        raise cursor.fail(f"key {key!r} occurs twice")
    (kind,) = cursor.unpack("<I", f"the type of key {key!r}")
    metadata[key] = _read_value(cursor, kind, f"key {key!r}")


def _read_value(cursor: _Cursor, kind: int, what: str) -> Any:
    if kind == _STRING:
        return cursor.string(what)
    if kind == _ARRAY:
        return _read_array(cursor, what)
    return _read_numbers(cursor, kind, 1, what)[0].item()


def _read_numbers(cursor: _Cursor, kind: int, count: int, what: str) -> np.ndarray:
    if kind not in _SCALARS:
        raise cursor.fail(f"{what} has the unknown type {kind}")
    dtype = np.dtype(_SCALARS[kind])
    values = np.frombuffer(cursor.take(count * dtype.itemsize, what), dtype)
    if kind == _BOOL:
        if (values > 1).any():
            raise cursor.fail(f"{what} holds a truth value other than 0 and 1")
        return values.astype(bool)
    return values


def _read_array(cursor: _Cursor, what: str) -> Any:
    kind, count = cursor.unpack("<IQ", what)
    if kind == _ARRAY:
        raise cursor.fail(f"{what} is an array of arrays, which is not supported")
    if kind != _STRING:
        return _read_numbers(cursor, kind, count, what)
    if count * 8 > cursor.left():
        raise cursor.fail(f"{what} claims {count} strings, which do not fit the file")
    return [cursor.string(what) for _ in range(count)]


def _read_tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string("a tensor name")
    (n_dims,) = cursor.unpack("<I", f"tensor {name!r}")
    if not 1 <= n_dims <= _MAX_DIMS:
        raise cursor.fail(f"tensor {name!r} has {n_dims} dimensions, which is not in 1 to {_MAX_DIMS}")
    dims = cursor.unpack(f"<{n_dims}Q", f"tensor {name!r}")
    kind, offset = cursor.unpack("<IQ", f"tensor {name!r}")
    return name, dims, kind, offset


def _place_tensors(cursor: _Cursor, header: Header, raw: list) -> None:
    alignment = header.metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment}, not a power of two from 8 to {_MAX_ALIGNMENT}")
    start = -(-cursor.position // alignment) * alignment
    for name, dims, kind, offset in raw:
        if name in header.tensors:
            raise cursor.fail(f"tensor {name!r} occurs twice")
        header.tensors[name] = _tensor_info(cursor, name, dims, kind, start, offset, alignment)
    end, before = start, ""
    for info in sorted(header.tensors.values(), key=lambda t: t.offset):
        if info.offset < end:
            raise cursor.fail(f"tensors {before!r} and {info.name!r} overlap")
        end, before = info.offset + info.size, info.name


def _tensor_info(cursor: _Cursor, name: str, dims: tuple[int, ...], kind: int, start: int, offset: int, alignment: int) -> TensorInfo:
    try:
        ggml_type = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[ggml_type]
    except (ValueError, KeyError) as error:
        raise cursor.fail(f"tensor {name!r} has the unknown type {kind}") from error
    count = math.prod(dims)
    if not 0 < count < 1 << 63:
        raise cursor.fail(f"tensor {name!r} has the impossible dimensions {list(dims)}")
    if dims[0] % block:
        raise cursor.fail(f"tensor {name!r} has rows of {dims[0]} values, not whole blocks of {block} ({ggml_type.name})")
    size = count // block * block_bytes
    if offset % alignment:
        raise cursor.fail(f"tensor {name!r} starts at {offset}, not a multiple of the alignment {alignment}")
    if start + offset + size > cursor.file.size:
        raise cursor.fail(f"tensor {name!r} ends at byte {start + offset + size}, but the file has {cursor.file.size}")
    return TensorInfo(name, ggml_type, tuple(reversed(dims)), start + offset, size)
