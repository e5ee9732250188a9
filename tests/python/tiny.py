# SPDX-License-Identifier: Apache-2.0
"""Deterministic tiny checkpoints for tests: Hugging Face folders and GGUF files of the supported architectures, a byte-level
tokenizer, and a model that recites a script."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 320
BOS, EOS, TURN = "<|begin|>", "<|end|>", "<|turn|>"
TEXT = """The quick brown fox jumps over the lazy dog. In 1234 there were 56 cats, and 7 of them said: hello world!
def square(x):
    return x * x  # it's fine, isn't it?
"""
_CLASSES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_BITS = {"F32": "<f4", "F16": "<f2"}


# ---- models -----------------------------------------------------------------------------------------------------


def config(arch: str = "llama", **changes) -> dict:
    """config.json of a tiny model. A change to None removes the key; use NULL for a null."""
    values = {
        "model_type": arch,
        "architectures": [_CLASSES.get(arch, arch)],
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if arch == "mistral":
        values["sliding_window"] = NULL
    values |= changes
    return {key: None if value is NULL else value for key, value in values.items() if value is not None}


NULL = object()


def weights(cfg: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors by their Hugging Face names; norms near 1, biases not 0, so that nothing hides."""
    random = np.random.default_rng(seed)
    return {name: _values(name, shape, random) for name, shape in shapes(cfg).items()}


def _values(name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    values = random.standard_normal(shape, dtype=np.float32)
    if "norm" in name:
        return 1 + np.float32(0.2) * values
    return np.float32(0.3 if name.endswith("bias") else 0.15) * values


def shapes(cfg: dict) -> dict[str, tuple[int, ...]]:
    arch, width, inner, heads = cfg["model_type"], cfg["hidden_size"], cfg["intermediate_size"], cfg["num_attention_heads"]
    d = cfg.get("head_dim") or width // heads
    q, kv = heads * d, (cfg.get("num_key_value_heads") or heads) * d
    linears = {
        "self_attn.q_proj": (q, width), "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, q), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner),
    }  # fmt: skip
    biased = [name for name in linears if _has_bias(cfg, name)]
    result = {"model.embed_tokens.weight": (cfg["vocab_size"], width), "model.norm.weight": (width,)}
    for i in range(cfg["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        result |= {f"{layer}{name}.weight": shape for name, shape in linears.items()}
        result |= {f"{layer}{name}.bias": linears[name][:1] for name in biased}
        result |= {f"{layer}{name}.weight": (width,) for name in ("input_layernorm", "post_attention_layernorm")}
        if arch == "qwen3":
            result |= {f"{layer}self_attn.{name}.weight": (d,) for name in ("q_norm", "k_norm")}
    if not cfg.get("tie_word_embeddings"):
        result["lm_head.weight"] = (cfg["vocab_size"], width)
    return result


def _has_bias(cfg: dict, name: str) -> bool:
    if name.startswith("mlp"):
        return bool(cfg.get("mlp_bias"))
    if cfg["model_type"] == "qwen2":
        return not name.endswith("o_proj")
    return bool(cfg.get("attention_bias"))


def script_model(folder: str | os.PathLike, successor: dict[int, int], vocab: int = VOCAB, **files) -> Path:
    """A model whose next token is successor[t] for token t, at any usual temperature: the embedding is the identity and both
    branches of the layer are zero, so the head sees which token it was."""
    cfg = config("llama", hidden_size=vocab, vocab_size=vocab, num_hidden_layers=1, num_attention_heads=4, head_dim=16)
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes(cfg).items()}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.0.{name}.weight"][:] = 0
    tensors["model.embed_tokens.weight"] = np.eye(vocab, dtype=np.float32)
    head = np.zeros((vocab, vocab), np.float32)
    for token, following in successor.items():
        head[following, token] = 1
    tensors["lm_head.weight"] = head
    return write_hf(folder, cfg, tensors, **files)


# ---- Hugging Face folders ---------------------------------------------------------------------------------------


def write_hf(
    folder: str | os.PathLike,
    cfg: dict | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    *,
    shards: int = 1,
    dtype: str = "F32",
    tokenizer: str | None = "",
    tokenizer_config: dict | None = None,
    generation_config: dict | None = None,
    chat_template: str | None = None,
) -> Path:
    """Write a checkpoint. tokenizer: "" is the tiny one, None is none. Tensors may also be (dtype name, shape, bytes)."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    cfg = config() if cfg is None else cfg
    tensors = weights(cfg) if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps(cfg))
    _write_shards(folder, tensors, shards, dtype)
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(tokenizer or tokenizer_json(), encoding="utf-8")
    for name, value in (("tokenizer_config.json", tokenizer_config), ("generation_config.json", generation_config)):
        if value is not None:
            (folder / name).write_text(json.dumps(value))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder


def _write_shards(folder: Path, tensors: dict, shards: int, dtype: str) -> None:
    names = sorted(tensors)
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, dtype)
        return
    table = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        write_safetensors(folder / file, part, dtype)
        table |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))


def bf16(values: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    """Values cut to bfloat16, as write_safetensors takes them."""
    return "BF16", values.shape, (np.ascontiguousarray(values, "<f4").view("<u4") >> 16).astype("<u2").tobytes()


def write_safetensors(path: str | os.PathLike, tensors: dict, dtype: str = "F32") -> None:
    entries, data = {}, bytearray()
    for name, value in tensors.items():
        kind, shape, raw = _raw(value, dtype)
        entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    header = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
    header += b" " * (-len(header) % 8)
    Path(path).write_bytes(struct.pack("<Q", len(header)) + header + data)


def _raw(value, dtype: str) -> tuple[str, tuple[int, ...], bytes]:
    if isinstance(value, tuple):
        return value
    return bf16(value) if dtype == "BF16" else (dtype, value.shape, value.astype(_BITS[dtype]).tobytes())


# ---- GGUF files -------------------------------------------------------------------------------------------------

_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    fixed = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    if name in fixed:
        return fixed[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_GGUF_NAMES[part]}.{kind}"


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as llama files hold them: the two halves of each head interleaved."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def gguf_tensors(cfg: dict, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    result = {}
    for name, value in tensors.items():
        if cfg["model_type"] in ("llama", "mistral"):
            if ".q_proj." in name:
                value = permute(value, cfg["num_attention_heads"])
            if ".k_proj." in name:
                value = permute(value, cfg["num_key_value_heads"])
        result[gguf_name(name)] = value
    return result


def write_gguf(
    path: str | os.PathLike,
    cfg: dict | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    *,
    types: dict[str, GGMLQuantizationType] | GGMLQuantizationType = GGMLQuantizationType.F32,
    keys: dict | None = None,
    raw: dict[str, tuple[np.ndarray, GGMLQuantizationType]] | None = None,
    tokenizer: bool = True,
    split: int = 0,
) -> Path:
    """The same model as a GGUF file. types: of matrices, all or by GGUF name. keys: more metadata, {arch} stands for the
    architecture; a value of None removes a key. raw: tensors given as bytes. split: tensors per part."""
    cfg = config() if cfg is None else cfg
    tensors = weights(cfg) if tensors is None else tensors
    arch = {"mistral": "llama"}.get(cfg["model_type"], cfg["model_type"])
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    metadata = _gguf_keys(cfg) | (gguf_tokenizer() if tokenizer else {}) | (keys or {})
    for key, value in metadata.items():
        if value is not None:
            _add_key(writer, key.replace("{arch}", arch), value)
    for name, value in gguf_tensors(cfg, tensors).items():
        if raw and name in raw:
            continue
        kind = types if isinstance(types, GGMLQuantizationType) else types.get(name, GGMLQuantizationType.F32)
        kind = GGMLQuantizationType.F32 if value.ndim == 1 else kind
        writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    for name, (value, kind) in (raw or {}).items():
        writer.add_tensor(name, value, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _gguf_keys(cfg: dict) -> dict:
    d = cfg.get("head_dim") or cfg["hidden_size"] // cfg["num_attention_heads"]
    return {
        "{arch}.block_count": cfg["num_hidden_layers"],
        "{arch}.context_length": cfg["max_position_embeddings"],
        "{arch}.embedding_length": cfg["hidden_size"],
        "{arch}.feed_forward_length": cfg["intermediate_size"],
        "{arch}.attention.head_count": cfg["num_attention_heads"],
        "{arch}.attention.head_count_kv": cfg["num_key_value_heads"],
        "{arch}.attention.key_length": d,
        "{arch}.attention.value_length": d,
        "{arch}.attention.layer_norm_rms_epsilon": float(cfg["rms_norm_eps"]),
        "{arch}.rope.freq_base": float(cfg["rope_theta"]),
        "{arch}.vocab_size": cfg["vocab_size"],
    }


def _add_key(writer: gguf.GGUFWriter, key: str, value) -> None:
    kinds = gguf.GGUFValueType
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, tuple):  # (sub type name, list)
        writer.add_key_value(key, value[1], kinds.ARRAY, sub_type=kinds[value[0]])
    else:
        writer.add_array(key, value)


# ---- tokenizer --------------------------------------------------------------------------------------------------

_cached_tokenizer: str | None = None


def tokenizer_json() -> str:
    """A byte-level BPE tokenizer of VOCAB tokens; ids 0, 1, 2 are BOS, EOS and TURN."""
    global _cached_tokenizer
    if _cached_tokenizer is None:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        special = [AddedToken(token, special=True, normalized=False) for token in (BOS, EOS, TURN)]
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator([TEXT], trainer)
        assert tokenizer.get_vocab_size() == VOCAB
        _cached_tokenizer = tokenizer.to_str()
    return _cached_tokenizer


def gguf_tokenizer(pre: str | None = "gpt-2") -> dict:
    """The same tokenizer as GGUF keys."""
    model = json.loads(tokenizer_json())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": ("INT32", [3 if i < 3 else 1 for i in range(len(tokens))]),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
