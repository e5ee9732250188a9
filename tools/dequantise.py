# SPDX-License-Identifier: Apache-2.0
"""Decode the weights of a model file to f32: python -m hisparse_rt.tools.dequantise SRC.hsr DST.hsr

The result computes with exactly the numbers that SRC stands for, so that comparing the two separates the error of the kernels
from that of the grid the weights were rounded to."""

from __future__ import annotations

import argparse
import os
import sys

import numpy as np

from . import packing
from .errors import ConvertError
from .hsr_file import HsrFile, HsrWriter, OutTensor


def dequantise(src: str | os.PathLike, dst: str | os.PathLike) -> int:
    """Write the model file SRC as dtype f32 to DST; the number of its bytes. ConvertError names what is wrong."""
    src, dst = os.fspath(src), os.fspath(dst)
    if os.path.exists(dst) and os.path.samefile(src, dst):
        raise ConvertError(f"{dst} is the source itself")
    with HsrFile(src) as source, HsrWriter(dst) as writer:
        metadata = {key: _plain(value) for key, value in source.metadata.items()
                    if key not in ("general.architecture", "general.alignment")}
        metadata["hisparse.weight_dtype"] = "f32"
        names = list(source.tensors)
        writer.begin(metadata, [OutTensor(name, _shape(source, name), "f32" if _is_matrix(source, name) else None) for name in names])
        for name in names:
            _copy(source, writer, name)
        return writer.commit()


def _plain(value: object) -> object:
    return [int(item) for item in value] if isinstance(value, (list, tuple, np.ndarray)) else value


def _is_matrix(source: HsrFile, name: str) -> bool:
    return len(source.tensors[name].shape) == 2


def _shape(source: HsrFile, name: str) -> tuple[int, ...]:
    return tuple(int(side) for side in source.tensors[name].shape)


def _copy(source: HsrFile, writer: HsrWriter, name: str) -> None:
    if not _is_matrix(source, name):
        writer.write(name, 0, source.vector(name))
        return
    n, k = _shape(source, name)
    values = source.matrix(name, n, k)
    values[:, _inputs(source, name):] = 0  # a q4 group's minimum also stands behind its padding
    codes, _ = packing.pack(packing.encode(values, "f32", name), "f32")
    writer.write(name, 0, codes)


def _inputs(source: HsrFile, name: str) -> int:
    """The inputs of a matrix without padding."""
    get = {key: source.metadata[f"hisparse.{key}"] for key in ("hidden_size", "intermediate_size", "head_count", "head_dim")}
    if name.endswith(".attn_output.weight"):
        return get["head_count"] * get["head_dim"]
    return get["intermediate_size"] if name.endswith(".ffn_down.weight") else get["hidden_size"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hisparse_rt.tools.dequantise", description="Decode a model file's weights to f32.")
    parser.add_argument("src", help="a .hsr file of any dtype")
    parser.add_argument("dst", help="the .hsr file to write")
    options = parser.parse_args(argv)
    try:
        dequantise(options.src, options.dst)
    except ConvertError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
