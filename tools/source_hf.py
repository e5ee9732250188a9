# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model folder: config.json, safetensors shards and tokenizer files."""

from __future__ import annotations

import os
import re
from typing import Any

from . import rope, safetensors_file, tokenizer_hf
from .errors import ConvertError, listed, shown
from .files import RangeFile, read_json_object
from .safetensors_file import Entry
from .spec import Source, require_family, require_head_dim
from .tensors import Tensor

_OWN_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
    **{
        f"{part}.{kind}": f"model.layers.{{}}.{module}.{kind}"
        for kind in ("weight", "bias")
        for part, module in {
            "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
            "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
            "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
        }.items()
    },
}  # fmt: skip
_CANONICAL = {own: canonical for canonical, own in _OWN_NAMES.items()}
_CLASSES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
_SCALE_SUFFIXES = ("_scale_inv", "_scale")

# Scales of activations and of quantised caches: hints for other engines, no part of the weights.
_SKIPPED = re.compile(r".*(\.rotary_emb\.inv_freq|\.(input|activation|output|k|v|q|kv)_scale)")

# What the configuration classes of the transformers library assume when config.json is silent.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "head_dim": 128,
    },
}


def open_source(folder: str) -> Source:
    files: list[RangeFile] = []
    try:
        return _open(folder, files)
    except BaseException:
        for file in files:
            file.close()
        raise


def _open(folder: str, files: list[RangeFile]) -> Source:
    path = os.path.join(folder, "config.json")
    config = read_json_object(path)
    files.append(RangeFile(path))
    config = _Config(shown(path), config, _architecture(shown(path), config))
    heads, width = config.whole("num_attention_heads"), config.whole("hidden_size")
    head_dim = config.head_dim(heads, width)
    require_head_dim(head_dim, config.where)
    warnings: list[str] = []
    context = config.whole("max_position_embeddings")
    config.refuse_window(context)
    config.refuse_activation()
    rotation = rope.from_config(config.values, head_dim, context, warnings)
    entries = _open_shards(folder, files)
    tensors, extra = _tensors(entries, config.block())
    tokenizer = tokenizer_hf.read(folder, config.values, files, warnings)
    return Source(
        where=shown(folder),
        name=os.path.basename(os.path.realpath(folder)).encode("utf-8", "replace").decode(),
        arch=config.arch,
        files=files,
        hidden_size=width,
        intermediate_size=config.whole("intermediate_size"),
        layer_count=config.whole("num_hidden_layers"),
        head_count=heads,
        kv_head_count=config.whole("num_key_value_heads", heads),
        head_dim=head_dim,
        context_length=context,
        rms_norm_eps=rope.number(config.values, "rms_norm_eps", 1e-6),
        attention_scale=head_dim**-0.5,
        rope=rotation,
        tensors=tensors,
        extra=extra,
        tokenizer=tokenizer,
        own_names=_OWN_NAMES,
        stated_vocab=config.whole("vocab_size", 0) or None,
        tied=config.flag("tie_word_embeddings"),
        bias_flags=config.bias_flags(),
        hint=config.quantisation_hint(),
        warnings=warnings,
    )


def read_sizes(path: str) -> dict[str, int]:
    """Hyper-parameters of a config.json, by their names in hsr_model_info, and whether embedding and head are `tied`."""
    values = read_json_object(path)
    config = _Config(shown(path), values, _architecture(shown(path), values))
    heads, width = config.whole("num_attention_heads"), config.whole("hidden_size")
    head_dim, context = config.head_dim(heads, width), config.whole("max_position_embeddings")
    require_head_dim(head_dim, config.where)
    config.refuse_window(context)
    return {
        "hidden_size": width, "intermediate_size": config.whole("intermediate_size"), "n_layers": config.whole("num_hidden_layers"),
        "n_heads": heads, "n_kv_heads": config.whole("num_key_value_heads", heads), "head_dim": head_dim,
        "rotary_dim": rope.from_config(config.values, head_dim, context, []).rotary_dim, "context_length": context,
        "vocab_size": config.whole("vocab_size"), "tied": int(config.flag("tie_word_embeddings")),
    }


def _architecture(where: str, config: dict) -> str:
    """By model_type and class name; both have to mean the same supported family."""
    model_type, classes = config.get("model_type"), config.get("architectures") or []
    are_names = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    if not are_names or not isinstance(model_type, str | None):
        raise ConvertError(f"{where}: model_type is not a string or architectures not a list of them")
    if model_type is None and not classes:
        raise ConvertError(f"{where} names no model_type and no architectures")
    if model_type is not None:
        require_family(model_type, where)
    for name in classes:
        if name not in _CLASSES:
            yet = " yet" if name.startswith(("Glm", "ChatGLM")) else ""
            raise ConvertError(f"{where}: architecture {name!r} is not supported{yet} (supported: {', '.join(_CLASSES)})")
        if model_type is not None and _CLASSES[name] != model_type:
            raise ConvertError(f"{where}: model_type {model_type!r} and architecture {name!r} contradict each other")
    return model_type or _CLASSES[classes[0]]


class _Config:
    """config.json with typed access."""

    def __init__(self, where: str, values: dict, arch: str):
        self.where, self.values, self.arch = where, values, arch
        self._defaults = _DEFAULTS[arch]

    def whole(self, key: str, fallback: int | None = None) -> int:
        """A count. A key that is absent takes the class default, a null the fallback."""
        value = self.values.get(key, self._defaults.get(key))
        if value is None and fallback is not None:
            return fallback
        if type(value) is not int or not 1 <= value < 1 << 31:
            raise ConvertError(f"{self.where}: {key} is {'missing' if value is None else repr(value)}, not a count")
        return value

    def limit(self, key: str) -> int | None:
        """A count that may be null, for none."""
        value = self.values.get(key, self._defaults.get(key))
        if value is not None and (type(value) is not int or not 0 <= value < 1 << 31):
            raise ConvertError(f"{self.where}: {key} is {value!r}, not a count or null")
        return value

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise ConvertError(f"{self.where}: {key} is {value!r}, not a truth value")
        return bool(value)

    def head_dim(self, heads: int, width: int) -> int:
        if self.values.get("head_dim", self._defaults.get("head_dim")) is not None:
            return self.whole("head_dim")
        if width % heads:
            raise ConvertError(f"{self.where}: there is no head_dim, and hidden_size {width} is not a multiple of {heads} heads")
        return width // heads

    def _window(self, context: int) -> int | None:
        """The sliding window, if one of the layers really has one."""
        if self.arch == "llama":
            return None
        if self.arch != "mistral":
            layers = self.values.get("layer_types")
            sliding = "sliding_attention" in layers if isinstance(layers, list) else self._late_layers_slide()
            if not self.flag("use_sliding_window") or not sliding:
                return None
        window = self.limit("sliding_window")
        return window if window is not None and window < context else None

    def _late_layers_slide(self) -> bool:
        first = self.limit("max_window_layers")
        return first is None or first < self.whole("num_hidden_layers")

    def refuse_window(self, context: int) -> None:
        window = self._window(context)
        if window is not None:
            origin = "" if "sliding_window" in self.values else " (the default of an absent key)"
            raise ConvertError(f"{self.where}: {self.arch} with an active sliding_window of {window}{origin} is not supported")

    def refuse_activation(self) -> None:
        name = self.values.get("hidden_act", "silu")
        if name not in ("silu", "swish"):
            raise ConvertError(f"{self.where}: hidden_act {name!r} is not supported (supported: silu)")

    def bias_flags(self) -> dict[str, bool]:
        attention, mlp = self.flag("attention_bias"), self.flag("mlp_bias")
        flags = {"attn_qkv": attention, "attn_output": attention} if self.arch in ("llama", "qwen3") else {}
        return flags | ({"ffn_gate_up": mlp, "ffn_down": mlp} if self.arch == "llama" else {})

    def _quantisation(self) -> dict:
        value = self.values.get("quantization_config")
        return value if isinstance(value, dict) else {}

    def block(self) -> tuple[int, int]:
        block = self._quantisation().get("weight_block_size") or [128, 128]
        if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
            raise ConvertError(f"{self.where}: weight_block_size {block!r} is not a pair of counts")
        return block[0], block[1]

    def quantisation_hint(self) -> str:
        method = self._quantisation().get("quant_method")
        return f" (config.json says the weights are quantised by {method!r})" if method else ""


# ---- shards -----------------------------------------------------------------------------------------------------


def _open_shards(folder: str, files: list[RangeFile]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for name in _shard_names(folder):
        file = RangeFile(os.path.join(folder, name))
        files.append(file)
        for key, entry in safetensors_file.read_entries(file).items():
            if key in entries:
                raise ConvertError(f"tensor {key} is in {entries[key].file.shown} and again in {file.shown}")
            entries[key] = entry
    return entries


def _shard_names(folder: str) -> list[str]:
    """The weight files: the single one, else those of the index, else a complete numbered set."""
    try:
        present = set(os.listdir(folder))
    except OSError as error:
        raise ConvertError(f"cannot read {shown(folder)}: {error.strerror}") from error
    if "model.safetensors" in present:
        return ["model.safetensors"]
    if "model.safetensors.index.json" in present:
        wanted = _index_names(os.path.join(folder, "model.safetensors.index.json"))
    else:
        wanted = _numbered_names(folder, present)
    missing = wanted - present
    if missing:
        raise ConvertError(f"{shown(folder)}: missing weight files: {listed(map(shown, missing))}")
    return sorted(wanted)


def _index_names(path: str) -> set[str]:
    table = read_json_object(path).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise ConvertError(f"{shown(path)} has no weight_map of tensor names to file names")
    for name in table.values():
        if os.path.basename(name) != name or not name:
            raise ConvertError(f"{shown(path)} names the file {name!r}, which is not in the folder itself")
    return set(table.values())


def _numbered_names(folder: str, present: set[str]) -> set[str]:
    numbered = [re.fullmatch(r"(model-)(\d{5})(-of-)(\d{5})(\.safetensors)", name) for name in present]
    totals = {match[4] for match in numbered if match}
    if len(totals) == 1:
        total = totals.pop()
        return {f"model-{i:05d}-of-{total}.safetensors" for i in range(1, int(total) + 1)}
    others = {name for name in present if name.endswith(".safetensors")}
    if not others:
        torch = any(name.endswith((".bin", ".pt", ".pth")) for name in present)
        raise ConvertError(f"{shown(folder)} has no safetensors files" + (", only PyTorch ones, which are not read" if torch else ""))
    if len(others) > 1:
        raise ConvertError(f"{shown(folder)} has several safetensors files and no index: {listed(map(shown, others))}")
    return others


def _tensors(entries: dict[str, Entry], block: tuple[int, int]) -> tuple[dict[str, Tensor], list[str]]:
    """Canonical tensors, and the names that are left over."""
    tensors, extra = {}, []
    scales = {name + suffix for name, entry in entries.items() if entry.dtype == "F8_E4M3" for suffix in _SCALE_SUFFIXES}
    for name, entry in entries.items():
        canonical = _canonical(name)
        if canonical is not None:
            companions = [entries[name + suffix] for suffix in _SCALE_SUFFIXES if name + suffix in entries]
            tensors[canonical] = safetensors_file.tensor(entry, companions[0] if companions else None, block)
        elif name not in scales and not _SKIPPED.fullmatch(name):
            extra.append(name)
    return tensors, extra


def _canonical(name: str) -> str | None:
    match = re.fullmatch(r"model\.layers\.(0|[1-9]\d{0,5})\.(.+)", name)
    if match is None:
        return _CANONICAL.get(name)
    part = _CANONICAL.get(f"model.layers.{{}}.{match[2]}")
    return None if part is None else f"blk.{match[1]}.{part}"
