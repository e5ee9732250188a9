# SPDX-License-Identifier: Apache-2.0
"""Reads a model file back into Hugging Face names, decoding the packing by the index formulas of docs/model-file.md: a second
implementation against which the converter's is tested."""

from __future__ import annotations

import os

import numpy as np
from reference import forward

from hisparse_rt.tools.hsr_file import HsrFile


def decode(data: np.ndarray, dtype: str, n: int, k: int) -> np.ndarray:
    """Weights [n, k] of a packed matrix, one index computation per weight."""
    panels, runs = -(-n // 16), -(-k // 32)
    row, col = np.arange(n)[:, None], np.arange(k)[None, :]
    panel, lane, run, at = row // 16, row % 16, col // 32, col % 32
    block = panel * runs + run
    if dtype == "f32":
        return data.view("<f4")[block * 512 + at * 16 + lane]
    if dtype == "bf16":
        bits = data.view("<u2")[block * 512 + (at // 2) * 32 + lane * 2 + at % 2]
        return (bits.astype("<u4") << 16).view("<f4")
    if dtype == "q8":
        codes = data.view("i1")[block * 512 + (at // 4) * 64 + lane * 4 + at % 4]
        scales = data[panels * runs * 512 :].view("<f2")[block * 16 + lane]
        return codes.astype(np.float32) * scales.astype(np.float32)
    within = at % 8
    byte = data[block * 256 + (at // 8) * 64 + lane * 4 + within % 4]
    codes = np.where(within < 4, byte & 15, byte >> 4)
    tail = data[panels * runs * 256 :].view("<f2").astype(np.float32)
    return codes.astype(np.float32) * tail[block * 32 + lane] + tail[block * 32 + 16 + lane]


class ReadBack:
    def __init__(self, path: str | os.PathLike):
        self._path = os.fspath(path)
        self._file = HsrFile(path)
        self.metadata = self._file.metadata
        self.names = list(self._file.tensors)

    def get(self, key: str):
        return self.metadata.get("hisparse." + key)

    def dtype(self, name: str) -> str:
        return self._file.dtype(name)

    def vector(self, name: str) -> np.ndarray:
        return self._file.vector(name)

    def matrix(self, name: str, n: int, k: int) -> np.ndarray:
        info = self._file.tensors[name]
        return decode(np.fromfile(self._path, np.uint8, info.size, offset=info.offset), self.dtype(name), n, k)

    def weights(self) -> dict[str, np.ndarray]:
        """All tensors by their Hugging Face names, fused ones taken apart."""
        width, vocab = self.get("hidden_size"), self.get("vocab_size")
        result = {
            "model.embed_tokens.weight": self.matrix("token_embd.weight", vocab, width),
            "model.norm.weight": self.vector("output_norm.weight"),
        }
        if "output.weight" in self.names:
            result["lm_head.weight"] = self.matrix("output.weight", vocab, width)
        for i in range(self.get("layer_count")):
            result |= {f"model.layers.{i}.{name}": value for name, value in self._layer(f"blk.{i}.")}
        return result

    def _layer(self, prefix: str):
        width, inner, d = self.get("hidden_size"), self.get("intermediate_size"), self.get("head_dim")
        q, kv, inner_up = self.get("head_count") * d, self.get("kv_head_count") * d, -(-self.get("intermediate_size") // 16) * 16
        plain = {
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
        }
        for part, name in plain.items():
            if f"{prefix}{part}.weight" in self.names:
                yield f"{name}.weight", self.vector(f"{prefix}{part}.weight")
        shapes = {
            "attn_qkv": (q + 2 * kv, width),
            "attn_output": (width, q),
            "ffn_gate_up": (2 * inner_up, width),
            "ffn_down": (width, inner),
        }
        for part, (n, k) in shapes.items():
            for kind in ("weight", "bias"):
                if f"{prefix}{part}.{kind}" in self.names:
                    value = self.matrix(f"{prefix}{part}.weight", n, k) if kind == "weight" else self.vector(f"{prefix}{part}.bias")
                    for name, rows in _apart(part, value, q, kv, inner):
                        yield f"{name}.{kind}", rows

    def logits(self, ids: list[int]) -> np.ndarray:
        """The reference forward pass over what the model file holds."""
        config = {
            "model_type": self.get("arch"), "num_hidden_layers": self.get("layer_count"), "num_attention_heads": self.get("head_count"),
            "hidden_size": self.get("hidden_size"), "head_dim": self.get("head_dim"), "rms_norm_eps": self.get("rms_norm_eps"),
        }  # fmt: skip
        tensors = {name: value.astype(np.float64) for name, value in self.weights().items()}
        return forward(config, tensors, ids, self.vector("rope.inv_freq").astype(np.float64), self.get("rope.attention_factor"))


def _apart(part: str, value: np.ndarray, q: int, kv: int, inner: int):
    if part == "attn_qkv":
        names, cuts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (0, q, q + kv, q + 2 * kv)
        return [(name, value[a:b]) for name, a, b in zip(names, cuts, cuts[1:])]
    if part == "ffn_gate_up":
        panels = value.reshape(-1, 2, 16, *value.shape[1:])
        assert not panels[:, 0].reshape(-1, *value.shape[1:])[inner:].any(), "padding rows are zero"
        return [(name, panels[:, i].reshape(-1, *value.shape[1:])[:inner]) for i, name in enumerate(("mlp.gate_proj", "mlp.up_proj"))]
    return [({"attn_output": "self_attn.o_proj", "ffn_down": "mlp.down_proj"}[part], value)]
