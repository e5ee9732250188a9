# SPDX-License-Identifier: Apache-2.0
"""The work a model asks for, in bytes and operations. A ceiling divided by it is a bound on speed."""
from __future__ import annotations

import os
from dataclasses import dataclass

from ..model import Model

_KV_COMPONENT_BYTES = {"f32": 4, "bf16": 2}


@dataclass(frozen=True)
class Shape:
    """What the bounds depend on."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    projection_weights: int
    """Weights of the layers' matrices."""
    step_bytes: int
    """Bytes of weights that one step reads: the layers, the last norm and the head; of an embedding that is not the head, a few rows."""
    dtype: str


def shape_of(model: Model) -> Shape:
    from ..tools.files import RangeFile
    from ..tools.gguf_header import read_header

    file = RangeFile(os.fsdecode(model.file))
    try:
        tensors = read_header(file).tensors
    finally:
        file.close()
    head = "output.weight" if "output.weight" in tensors else "token_embd.weight"
    layers = [tensor for name, tensor in tensors.items() if name.startswith("blk.")]
    info = model.info
    return Shape(
        n_layers=info.n_layers, n_heads=info.n_heads, n_kv_heads=info.n_kv_heads, head_dim=info.head_dim, dtype=info.dtype,
        projection_weights=sum(tensor.shape[0] * tensor.shape[1] for tensor in layers if len(tensor.shape) == 2),
        step_bytes=sum(tensor.size for tensor in layers) + tensors["output_norm.weight"].size + tensors[head].size,
    )


def kv_bytes(shape: Shape, kv: str, n_tokens: float, held: int) -> float:
    """Key-value bytes of n_tokens. held: what a session of them held in memory, for formats whose size is not that simple."""
    if kv not in _KV_COMPONENT_BYTES:
        return held
    return n_tokens * shape.n_layers * shape.n_kv_heads * 2 * shape.head_dim * _KV_COMPONENT_BYTES[kv]


def decode_bytes(shape: Shape, kv: float, batch: int) -> float:
    """Bytes one step reads for `batch` sessions with `kv` bytes each: the weights once, and every session's keys and values."""
    return shape.step_bytes + batch * kv


def prefill_operations(shape: Shape, depth: int) -> float:
    """Useful operations per token of a prompt: every weight once, and on average the half of the prompt that a token may see."""
    return 2 * shape.projection_weights + 4 * shape.n_heads * shape.head_dim * shape.n_layers * (depth + 1) / 2


def level(isa: str, dtype: str) -> str:
    """Where the engine multiplies: tiles hold no f32."""
    return "avx512" if isa == "amx" and dtype == "f32" else isa
