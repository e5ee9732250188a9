# SPDX-License-Identifier: Apache-2.0
"""A plain NumPy float64 forward pass of the supported architectures, straight from a Hugging Face folder. It is the oracle of
the tests, and shares no code with the converter or the runtime."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np


def logits(folder: str | Path, ids: list[int], context: int | None = None) -> np.ndarray:
    """Logits [T, vocab] after each token. context: length by which dynamic and longrope rope choose their table; default T."""
    config, tensors = load(folder)
    return forward(config, tensors, ids, *inverse_frequencies(config, context or len(ids)))


def load(folder: str | Path) -> tuple[dict, dict[str, np.ndarray]]:
    """config.json and all tensors as float64."""
    folder = Path(folder)
    tensors: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= _read_safetensors(path)
    return json.loads((folder / "config.json").read_text()), tensors


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    result = {}
    for name, info in json.loads(raw[8:start]).items():
        if name == "__metadata__":
            continue
        begin, end = info["data_offsets"]
        data = raw[start + begin : start + end]
        if info["dtype"] == "BF16":
            values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
        else:
            values = np.frombuffer(data, {"F32": "<f4", "F16": "<f2", "F64": "<f8"}[info["dtype"]])
        result[name] = values.astype(np.float64).reshape(info["shape"])
    return result


# ---- rope -------------------------------------------------------------------------------------------------------


def head_dim(config: dict) -> int:
    default = 128 if config["model_type"] == "qwen3" and "head_dim" not in config else None
    return config.get("head_dim") or default or config["hidden_size"] // config["num_attention_heads"]


def rope_settings(config: dict) -> dict:
    settings = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    settings.setdefault("rope_type", settings.get("type", "default"))
    settings.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    settings.setdefault("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if config.get("original_max_position_embeddings"):
        settings["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    settings.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    return settings


def inverse_frequencies(config: dict, context: int) -> tuple[np.ndarray, float]:
    """The table [r / 2] and the factor on cosines and sines."""
    s, trained = rope_settings(config), config["max_position_embeddings"]
    kind, base, old = s["rope_type"], float(s["rope_theta"]), s["original_max_position_embeddings"]
    r = int(head_dim(config) * s["partial_rotary_factor"])
    plain = np.array([base ** (-2 * j / r) for j in range(r // 2)])
    factor = float(s.get("factor") or trained / old)
    if kind == "linear":
        return plain / factor, 1.0
    if kind == "dynamic":
        n = max(context, trained)
        stretched = base * (factor * n / trained - (factor - 1)) ** (r / (r - 2))
        return np.array([stretched ** (-2 * j / r) for j in range(r // 2)]), 1.0
    if kind == "llama3":
        return np.array([_llama3(f, factor, s, old) for f in plain]), 1.0
    if kind == "yarn":
        return _yarn(plain, factor, s, r, base, old)
    if kind in ("longrope", "su"):
        spread = s.get("attention_factor") or (1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(old)))
        return plain / np.array(s["long_factor"] if context > old else s["short_factor"]), spread
    assert kind == "default", kind
    return plain, 1.0


def _llama3(f: float, factor: float, s: dict, old: int) -> float:
    wavelength = 2 * math.pi / f
    if wavelength < old / s["high_freq_factor"]:
        return f
    if wavelength > old / s["low_freq_factor"]:
        return f / factor
    smooth = (old / wavelength - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
    return (1 - smooth) * f / factor + smooth * f


def _yarn(plain: np.ndarray, factor: float, s: dict, r: int, base: float, old: int) -> tuple[np.ndarray, float]:
    def where(rotations: float) -> float:
        return r * math.log(old / (rotations * 2 * math.pi)) / (2 * math.log(base))

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    first, last = where(s.get("beta_fast") or 32), where(s.get("beta_slow") or 1)
    if s.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, r - 1)
    last += 0.001 if first == last else 0
    table = []
    for j, f in enumerate(plain):
        mix = min(max((j - first) / (last - first), 0), 1)
        table.append(f * (1 - mix) + f / factor * mix)
    spread = s.get("attention_factor")
    if spread is None:
        both = s.get("mscale") and s.get("mscale_all_dim")
        spread = magnitude(s["mscale"]) / magnitude(s["mscale_all_dim"]) if both else magnitude(1)
    return np.array(table), spread


# ---- forward ----------------------------------------------------------------------------------------------------


def forward(config: dict, tensors: dict[str, np.ndarray], ids: list[int], inv_freq: np.ndarray, rope_factor: float = 1.0) -> np.ndarray:
    eps = config.get("rms_norm_eps", 1e-6)
    x = tensors["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        x = x + _attention(config, tensors, layer, _norm(x, tensors[layer + "input_layernorm.weight"], eps), inv_freq, rope_factor)
        x = x + _mlp(tensors, layer + "mlp.", _norm(x, tensors[layer + "post_attention_layernorm.weight"], eps))
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    return _norm(x, tensors["model.norm.weight"], eps) @ head.T


def _norm(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    return gain * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def _linear(tensors: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    y = x @ tensors[name + ".weight"].T
    return y + tensors[name + ".bias"] if name + ".bias" in tensors else y


def _mlp(tensors: dict[str, np.ndarray], prefix: str, x: np.ndarray) -> np.ndarray:
    gate = _linear(tensors, prefix + "gate_proj", x)
    return _linear(tensors, prefix + "down_proj", gate / (1 + np.exp(-gate)) * _linear(tensors, prefix + "up_proj", x))


def _rotate(x: np.ndarray, inv_freq: np.ndarray, factor: float) -> np.ndarray:
    """x [T, heads, d]: component j turns with component j + r/2, the rest stays."""
    half = len(inv_freq)
    angle = np.arange(len(x))[:, None, None] * inv_freq
    cos, sin = np.cos(angle) * factor, np.sin(angle) * factor
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], axis=-1)


def _attention(config: dict, tensors: dict, layer: str, x: np.ndarray, inv_freq: np.ndarray, factor: float) -> np.ndarray:
    n, d, heads = len(x), head_dim(config), config["num_attention_heads"]
    names = [f"{layer}self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    q, k, v = (_linear(tensors, name, x).reshape(n, -1, d) for name in names[:3])
    if f"{layer}self_attn.q_norm.weight" in tensors:
        eps = config.get("rms_norm_eps", 1e-6)
        q, k = _norm(q, tensors[f"{layer}self_attn.q_norm.weight"], eps), _norm(k, tensors[f"{layer}self_attn.k_norm.weight"], eps)
    q, k = _rotate(q, inv_freq, factor), _rotate(k, inv_freq, factor)
    share = heads // k.shape[1]
    distance = np.arange(n)[:, None] - np.arange(n)
    window = config.get("sliding_window") if config["model_type"] == "mistral" else None
    visible = (distance >= 0) & (distance < (window or n))
    out = np.empty((n, heads, d))
    for h in range(heads):
        scores = np.where(visible, q[:, h] @ k[:, h // share].T / math.sqrt(d), -np.inf)
        weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, h] = weight / weight.sum(axis=-1, keepdims=True) @ v[:, h // share]
    return _linear(tensors, names[3], out.reshape(n, heads * d))
