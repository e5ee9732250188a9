# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model from its configuration alone, for planning: nothing of the weights is read, and they need not be there."""

from __future__ import annotations

import os

from . import packing, source_gguf, source_hf
from .errors import ConvertError


def sizes(source: str, dtype: str) -> dict[str, int]:
    """Hyper-parameters by their names in hsr_model_info, and the estimated bytes of the weights as `dtype`.

    source: a Hugging Face folder or its config.json, or a .gguf file. ConvertError for models that cannot be converted.
    """
    if source.lower().endswith(".gguf"):
        return _of_gguf(source, dtype)
    if os.path.isdir(source):
        source = os.path.join(source, "config.json")
    return _with_weights(source_hf.read_sizes(source), dtype)


def _of_gguf(path: str, dtype: str) -> dict[str, int]:
    source = source_gguf.open_source(path, True)
    try:
        found = {
            "hidden_size": source.hidden_size, "intermediate_size": source.intermediate_size, "n_layers": source.layer_count,
            "n_heads": source.head_count, "n_kv_heads": source.kv_head_count, "head_dim": source.head_dim,
            "rotary_dim": source.rope.rotary_dim, "context_length": source.context_length, "vocab_size": source.vocab_size,
            "tied": int("output.weight" not in source.tensors),
        }
    finally:
        source.close()
    return _with_weights(found, dtype)


def _with_weights(found: dict[str, int], dtype: str) -> dict[str, int]:
    width, inner, vocab, layers = (found[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "n_layers"))
    q, kv = found["n_heads"] * found["head_dim"], found["n_kv_heads"] * found["head_dim"]
    if found["n_heads"] % found["n_kv_heads"]:
        raise ConvertError(f"{found['n_heads']} heads are not a multiple of {found['n_kv_heads']} key/value heads")
    matrices = [(q + 2 * kv, width), (width, q), (2 * packing.padded(inner, packing.PANEL), width), (width, inner)]
    tables = 1 if found.pop("tied") else 2
    table_dtype = "q8" if dtype == "q4" else dtype
    norms = 4 * width * (2 * layers + 1)
    return found | {
        "weight_bytes": layers * sum(packing.packed_bytes(dtype, n, k) for n, k in matrices)
        + tables * packing.packed_bytes(table_dtype, vocab, width) + norms,
        "n_params": layers * sum(n * k for n, k in matrices) + tables * vocab * width + norms // 4,
    }
