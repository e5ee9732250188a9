# SPDX-License-Identifier: Apache-2.0
"""The calibration of a model: bases in which its keys are sketched and stored. Reads and writes `.hsrcal` files."""
from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .errors import FileMissingError, FormatError, InvalidError, VersionError, from_os_error

if TYPE_CHECKING:
    from .tools.files import RangeFile
    from .tools.gguf_header import Header

VERSION = 1
ARCHITECTURE = "hisparse-calibration"
SUFFIX = ".hsrcal"
CLASSES = ("gaussian", "sketch")
"""Of layers, by what finds their attention: a mean and a spread of each page as well as anything, or sketches of single keys only."""
_PRODUCT_ERROR = 1e-2  # of A B^T against the identity: far above rounding, far below another model's basis

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Calibration:
    """What calibration learned. Arrays by layer; d is the head size.

    With k' = k - mean of its page: z = A^T k' and q' = B^T q give q.k' = q'.z, because A B^T = I.
    """

    fingerprint: str
    """The `hisparse.source` of the model file it belongs to."""
    basis_k: Floats
    """A: [n_layers, n_kv_heads, d, d]."""
    basis_q: Floats
    """B: [n_layers, n_kv_heads, d, d]."""
    mean_k: Floats
    """[n_layers, n_kv_heads, d]: mean key of the text, after rope."""
    mean_v: Floats
    virtual: npt.NDArray[np.bool_]
    """[n_layers]: virtual tokens reduce the error of the attention output."""
    gap: Floats
    """[n_layers]: share of the attention that a Gaussian estimate misses and the sketch finds."""
    sketched: npt.NDArray[np.bool_] | None = None
    """[n_layers]: the gap is wide, the layer's class is "sketch" and not "gaussian". None: a file from before there were classes."""

    def __post_init__(self) -> None:
        layers, heads, d = self.basis_k.shape[:3]
        shapes = {"basis_k": (layers, heads, d, d), "basis_q": (layers, heads, d, d), "mean_k": (layers, heads, d),
                  "mean_v": (layers, heads, d), "virtual": (layers,), "gap": (layers,)}
        if self.sketched is not None:
            shapes["sketched"] = (layers,)
        for name, shape in shapes.items():
            value = getattr(self, name)
            if value.shape != shape:
                raise InvalidError(f"{name} has the shape {list(value.shape)}, not {list(shape)}")
            if not np.isfinite(value).all():
                layer = int(np.argwhere(~np.isfinite(value))[0][0])
                raise InvalidError(f"{name} of layer {layer} holds a value that is not finite")
        product = self.basis_k.astype(np.float64) @ self.basis_q.astype(np.float64).swapaxes(-1, -2)
        worst = np.abs(product - np.eye(d)).max(axis=(1, 2, 3))
        if (worst > _PRODUCT_ERROR).any():
            raise InvalidError(f"basis_k and basis_q of layer {int(worst.argmax())} do not belong together: A B^T is not the identity")

    @property
    def classes(self) -> tuple[str, ...] | None:
        """CLASSES by layer."""
        return None if self.sketched is None else tuple(CLASSES[int(one)] for one in self.sketched)

    @property
    def n_layers(self) -> int:
        return int(self.basis_k.shape[0])

    @property
    def n_kv_heads(self) -> int:
        return int(self.basis_k.shape[1])

    @property
    def head_dim(self) -> int:
        return int(self.basis_k.shape[2])


def beside(model: str) -> str:
    """Where the calibration of a model file is looked for."""
    return model.removesuffix(".hsr") + SUFFIX


_TENSORS = ("basis_k", "basis_q", "mean_k", "mean_v")


# ---- writing ----------------------------------------------------------------------------------------------------


def write_calibration(path: str | os.PathLike[str], calibration: Calibration) -> None:
    """Write the file; it gets its name only when it is whole and on the disk. FileError."""
    from .tools.new_file import NewFile

    try:
        with NewFile(os.path.realpath(path)) as file:
            assert file.name is not None
            _write(Path(file.name), calibration)
            file.commit()
    except OSError as error:
        raise from_os_error(f"cannot write {os.fspath(path)}", error) from error


def _write(path: Path, calibration: Calibration) -> None:
    from gguf import GGUFWriter
    from gguf.constants import GGUFValueType

    writer = GGUFWriter(path, ARCHITECTURE)
    try:
        writer.add_uint32("hisparse.cal.version", VERSION)
        writer.add_string("hisparse.cal.fingerprint", calibration.fingerprint)
        for name in ("n_layers", "n_kv_heads", "head_dim"):
            writer.add_uint32(f"hisparse.cal.{name}", getattr(calibration, name))
        for name, kind, dtype in (("virtual", GGUFValueType.UINT8, int), ("gap", GGUFValueType.FLOAT32, float)):
            values = [dtype(value) for value in getattr(calibration, name)]
            writer.add_key_value(f"hisparse.cal.{name}", values, GGUFValueType.ARRAY, sub_type=kind)
        if calibration.sketched is not None:
            classes = [int(one) for one in calibration.sketched]
            writer.add_key_value("hisparse.cal.class", classes, GGUFValueType.ARRAY, sub_type=GGUFValueType.UINT8)
        for layer in range(calibration.n_layers):
            for name in _TENSORS:
                writer.add_tensor(f"cal.{layer}.{name}", np.ascontiguousarray(getattr(calibration, name)[layer], np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


# ---- reading ----------------------------------------------------------------------------------------------------


def read_calibration(path: str | os.PathLike[str], fingerprint: str | None = None) -> Calibration:
    """The calibration in a file. fingerprint: that of the model it must belong to.

    FileError, VersionError, FormatError: damaged, of another kind, of wrong shapes, not finite, or made for other weights.
    """
    from .tools.errors import ConvertError
    from .tools.files import RangeFile
    from .tools.gguf_header import read_header

    name = os.fspath(path)
    if not os.path.exists(name):
        raise FileMissingError(f"{name}: no such file", sys_code=2)
    try:
        file = RangeFile(name)
        try:
            return _Reader(file, read_header(file)).read(fingerprint)
        finally:
            file.close()
    except (ConvertError, InvalidError) as error:
        text = str(error)
        raise FormatError(text if name in text else f"{name}: {text}") from None


class _Reader:
    def __init__(self, file: RangeFile, header: Header) -> None:
        self.file, self.header = file, header

    def read(self, fingerprint: str | None) -> Calibration:
        if self.header.metadata.get("general.architecture") != ARCHITECTURE:
            raise InvalidError("this is no calibration file")
        version = self.key("version", int)
        if version != VERSION:
            raise VersionError(f"{self.file.shown}: calibration format version {version}, this library reads {VERSION}")
        made_for = self.key("fingerprint", str)
        if fingerprint is not None and made_for != fingerprint:
            raise InvalidError(f"the calibration was made for other weights ({made_for}, not {fingerprint})")
        layers, heads, d = (self.key(name, int) for name in ("n_layers", "n_kv_heads", "head_dim"))
        if min(layers, heads, d) < 1 or layers * heads * d * d * 8 > self.file.size:
            raise InvalidError(f"{layers} layers of {heads} heads of size {d} do not fit the file of {self.file.size} bytes")
        shapes = ((heads, d, d), (heads, d, d), (heads, d), (heads, d))
        tensors = {name: np.stack([self.tensor(f"cal.{layer}.{name}", shape) for layer in range(layers)])
                   for name, shape in zip(_TENSORS, shapes, strict=True)}
        return Calibration(made_for, **tensors, virtual=self.key("virtual", np.ndarray) != 0,
                           gap=self.key("gap", np.ndarray).astype(np.float32), sketched=self.classes())

    def classes(self) -> Any:
        """Files from before there were classes have none."""
        return self.key("class", np.ndarray) != 0 if "hisparse.cal.class" in self.header.metadata else None

    def key(self, name: str, kind: type) -> Any:
        value = self.header.metadata.get(f"hisparse.cal.{name}")
        if not isinstance(value, kind):
            raise InvalidError(f"hisparse.cal.{name} is " + ("missing" if value is None else "of a wrong type"))
        return value

    def tensor(self, name: str, shape: tuple[int, ...]) -> Floats:
        info = self.header.tensors.get(name)
        if info is None:
            raise InvalidError(f"tensor {name} is missing")
        if info.type.name != "F32" or tuple(info.shape) != shape:
            raise InvalidError(f"tensor {name} is {info.type.name} {list(info.shape)}, not F32 {list(shape)}")
        return self.file.read(info.offset, info.size).view(np.float32).reshape(shape)
