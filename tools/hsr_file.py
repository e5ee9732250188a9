# SPDX-License-Identifier: Apache-2.0
"""Writing and reading of `.hsr` files. The header is written by the gguf package; tensor data is streamed behind it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType, GGUFValueType

from . import packing
from .errors import ConvertError, shown
from .files import RangeFile
from .gguf_header import Header, read_header
from .new_file import NewFile

ALIGNMENT = 4096
FORMAT_VERSION = 1
ARCHITECTURE = "hisparse"


@dataclass(frozen=True)
class OutTensor:
    """A tensor to be written: dtype None means plain F32 values of shape (n,)."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None

    @property
    def size(self) -> int:
        return 4 * self.shape[0] if self.dtype is None else packing.packed_bytes(self.dtype, *self.shape)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        if self.dtype is None:
            return self.shape
        return packing.padded(self.shape[0], packing.PANEL), packing.padded(self.shape[1], packing.RUN)


class HsrWriter:
    """Writes into a temporary file beside the destination, which takes its place only in `commit`. Used as a context: leaving
    it without a commit, for whatever reason, removes the temporary file."""

    def __init__(self, path: str):
        self._path = path
        self._file = NewFile(path)
        self._offsets: dict[str, int] = {}
        self._end = 0

    def __enter__(self) -> HsrWriter:
        try:
            self._file.__enter__()
        except OSError as error:
            raise self._failed(error) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._file.__exit__()

    def _failed(self, error: OSError) -> ConvertError:
        return ConvertError(f"cannot write {shown(self._path)}: {error.strerror}")

    def begin(self, metadata: dict[str, Any], tensors: list[OutTensor]) -> None:
        """Write the header. Metadata values: str, int (u32), float (f64), non-empty list of int (u32)."""
        writer = GGUFWriter(None, ARCHITECTURE)
        writer.add_custom_alignment(ALIGNMENT)
        for key, value in metadata.items():
            _add_value(writer, key, value)
        for tensor in tensors:
            kind = GGMLQuantizationType(packing.GGML_TYPE[tensor.dtype or "f32"])
            writer.add_tensor_info(tensor.name, tensor.stored_shape, np.dtype(np.float32), tensor.size, raw_dtype=kind)
        try:
            writer.write_header_to_file(Path(self._file.name))
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            start = packing.padded(os.fstat(self._file.descriptor).st_size, ALIGNMENT)
        except OSError as error:
            raise self._failed(error) from error
        finally:
            writer.close()
        for tensor in tensors:
            self._offsets[tensor.name] = start
            start += packing.padded(tensor.size, ALIGNMENT)
        self._end = start

    def write(self, name: str, offset: int, data: np.ndarray) -> None:
        """Place bytes at an offset inside a tensor."""
        view, at = memoryview(np.ascontiguousarray(data)).cast("B"), self._offsets[name] + offset
        try:
            while view:
                done = os.pwrite(self._file.descriptor, view, at)
                view, at = view[done:], at + done
        except OSError as error:
            raise self._failed(error) from error

    def commit(self) -> int:
        """Make the file durable and give it its name; the number of its bytes."""
        try:
            os.ftruncate(self._file.descriptor, self._end)
            self._file.commit()
        except OSError as error:
            raise self._failed(error) from error
        return self._end


def _add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_key_value(key, value, GGUFValueType.STRING)
    elif isinstance(value, float):
        writer.add_key_value(key, value, GGUFValueType.FLOAT64)
    elif isinstance(value, int):
        writer.add_key_value(key, value, GGUFValueType.UINT32)
    else:
        writer.add_key_value(key, list(value), GGUFValueType.ARRAY, sub_type=GGUFValueType.UINT32)


class HsrFile:
    """Read access to a `.hsr` file, for inspection and tests."""

    def __init__(self, path: str | bytes | os.PathLike):
        self._file = RangeFile(os.fsdecode(path))
        try:
            self._header: Header = read_header(self._file)
            if self.metadata.get("general.architecture") != ARCHITECTURE:
                raise ConvertError(f"{self._file.shown} is not a model file of this runtime")
        except ConvertError:
            self._file.close()
            raise

    @property
    def metadata(self) -> dict[str, Any]:
        return self._header.metadata

    @property
    def tensors(self) -> dict:
        """Name to gguf_header.TensorInfo, padded shapes."""
        return self._header.tensors

    def dtype(self, name: str) -> str:
        return {number: dtype for dtype, number in packing.GGML_TYPE.items()}[int(self.tensors[name].type)]

    def vector(self, name: str) -> np.ndarray:
        info = self.tensors[name]
        return self._file.read(info.offset, info.size).view(np.float32)

    def encoded(self, name: str, n: int, k: int) -> packing.Encoded:
        info = self.tensors[name]
        return packing.unpack(self._file.read(info.offset, info.size), self.dtype(name), n, k)

    def matrix(self, name: str, n: int, k: int) -> np.ndarray:
        """The float32 values [n, k] of a packed matrix."""
        return packing.decode(self.encoded(name, n, k), self.dtype(name))[:, :k]

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> HsrFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
