# SPDX-License-Identifier: Apache-2.0
"""A GGUF file, or all parts of a split one."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
from gguf import dequantize
from gguf.constants import GGML_QUANT_SIZES

from . import packing, rope, tokenizer_gguf
from .errors import ConvertError, listed, shown
from .files import RangeFile
from .gguf_header import Header, TensorInfo, read_header
from .packing import RUN, Encoded, encode_q8_levels
from .spec import Source, require_family, require_head_dim
from .tensors import Permuted, Tensor

# Settings that change the computation in a way the runtime does not know; they are fine when they change nothing.
_NEUTRAL = {
    "logit_scale": 1.0, "residual_scale": 1.0, "embedding_scale": 1.0, "attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0,
    "expert_count": 0, "attention.causal": True, "attention.max_alibi_bias": 0.0, "attention.clamp_kqv": 0.0,
    "use_parallel_residual": False,
}  # fmt: skip
_SKIPPED = re.compile(r"blk\.\d+\.attn_rot_embd(\.weight)?")
_NAMES = re.compile(r"(token_embd|output|output_norm)\.weight|blk\.(0|[1-9]\d{0,5})\.\w+\.(weight|bias)")


def open_source(path: str, allow_unknown_pretokenizer: bool) -> Source:
    files: list[RangeFile] = []
    try:
        return _open(path, files, allow_unknown_pretokenizer)
    except BaseException:
        for file in files:
            file.close()
        raise


def _open(path: str, files: list[RangeFile], allow_unknown_pretokenizer: bool) -> Source:
    header, parts = _read_parts(path, files)
    meta = _Metadata(shown(path), header.metadata)
    arch = meta.arch
    require_family(arch, shown(path))
    meta.refuse_unknown_settings()
    heads, width, context = meta.whole("attention.head_count"), meta.whole("embedding_length"), meta.whole("context_length")
    kv_heads, head_dim = meta.whole("attention.head_count_kv", heads), meta.head_dim(heads, width)
    require_head_dim(head_dim, meta.where)
    meta.refuse_window(context)
    warnings: list[str] = []
    infos = {name: (file, info) for file, part in zip(files, parts) for name, info in part.tensors.items()}
    divisors = _divisors(infos)
    rotation = _rope(meta, head_dim, context, divisors)
    tensors, extra = _tensors(infos)
    if arch == "llama":
        _undo_permutation(tensors, heads, kv_heads)
    return Source(
        where=shown(path),
        name=meta.text("general.name") or os.path.splitext(os.path.basename(shown(path)))[0],
        arch=arch,
        files=files,
        hidden_size=width,
        intermediate_size=meta.whole("feed_forward_length"),
        layer_count=meta.whole("block_count"),
        head_count=heads,
        kv_head_count=kv_heads,
        head_dim=head_dim,
        context_length=context,
        rms_norm_eps=meta.number("attention.layer_norm_rms_epsilon"),
        attention_scale=meta.number("attention.scale", head_dim**-0.5),
        rope=rotation,
        tensors=tensors,
        extra=extra,
        tokenizer=tokenizer_gguf.read(shown(path), header.metadata, allow_unknown_pretokenizer, warnings),
        own_names={},
        stated_vocab=meta.whole("vocab_size", 0) or None,
        warnings=warnings,
    )


class _Metadata:
    """The keys of one architecture with typed access."""

    def __init__(self, where: str, values: dict[str, Any]):
        self.where, self.values = where, values
        self.arch = self.text("general.architecture")
        if not self.arch:
            raise ConvertError(f"{where} has no general.architecture")
        if self.arch == "hisparse":
            raise ConvertError(f"{where} is already converted; a name that ends in .hsr loads as it is")

    def text(self, key: str) -> str:
        value = self.values.get(key, "")
        if not isinstance(value, str):
            raise ConvertError(f"{self.where}: key {key!r} is not a string")
        return value

    def get(self, key: str) -> Any:
        """The value of a key; an array that says the same for every layer counts as that one value."""
        value = self.values.get(f"{self.arch}.{key}")
        if isinstance(value, np.ndarray):
            if len(value) == 0 or (value != value[0]).any():
                raise ConvertError(f"{self.where}: key '{self.arch}.{key}' differs between layers, which is not supported")
            value = value[0].item()
        return value

    def whole(self, key: str, fallback: int | None = None) -> int:
        value = self.get(key)
        if value is None and fallback is not None:
            return fallback
        if type(value) is not int or not 1 <= value < 1 << 31:
            raise ConvertError(f"{self.where}: key '{self.arch}.{key}' is {'missing' if value is None else repr(value)}, not a count")
        return value

    def number(self, key: str, fallback: float | None = None) -> float:
        return _decimal(rope.number({f"{self.arch}.{key}": self.get(key)}, f"{self.arch}.{key}", fallback))

    def head_dim(self, heads: int, width: int) -> int:
        key, value = self.get("attention.key_length"), self.get("attention.value_length")
        if key is None and value is None:
            if width % heads:
                raise ConvertError(f"{self.where}: there is no key_length, and embedding_length {width} is not a multiple of {heads} heads")
            return width // heads
        head_dim = self.whole("attention.value_length" if key is None else "attention.key_length")
        if value is not None and value != head_dim:
            raise ConvertError(
                f"{self.where}: {self.arch}.attention.key_length {key} and value_length {value} differ, which is not supported"
            )
        return head_dim

    def refuse_window(self, context: int) -> None:
        window = self.whole("attention.sliding_window") if self.get("attention.sliding_window") else context  # 0: none
        if window < context:
            raise ConvertError(f"{self.where}: {self.arch} with an active sliding_window of {window} is not supported")

    def refuse_unknown_settings(self) -> None:
        for key, neutral in _NEUTRAL.items():
            value = self.get(key)
            if value is not None and value != neutral:
                raise ConvertError(f"{self.where}: '{self.arch}.{key}' is {value!r}, which is not supported")
        if f"{self.arch}.rope.dimension_sections" in self.values:
            raise ConvertError(f"{self.where}: '{self.arch}.rope.dimension_sections' (multimodal rope) is not supported")


def _decimal(value: float) -> float:
    """Metadata floats are single precision: 1e-5 comes back as 9.99999975e-06. The shortest decimal that gives the same single
    is what was meant."""
    single = np.float32(value)
    return float(str(single)) if float(single) == value else value


def _rope(meta: _Metadata, head_dim: int, context: int, divisors: np.ndarray | None) -> rope.Rope:
    rotary = meta.whole("rope.dimension_count", head_dim)
    if rotary % 2 or rotary > head_dim or (meta.arch == "llama" and rotary != head_dim):
        raise ConvertError(f"{meta.where}: '{meta.arch}.rope.dimension_count' {rotary} does not suit heads of {head_dim}")
    if divisors is not None and len(divisors) != rotary // 2:
        raise ConvertError(f"{meta.where}: tensor rope_freqs.weight has {len(divisors)} values, expected {rotary // 2}")
    factor = meta.get("rope.scaling.factor") or meta.get("rope.scale_linear") or None
    kind = meta.get("rope.scaling.type") or ("none" if factor is None else "linear")
    params = {"rope_theta": meta.number("rope.freq_base", 10000.0), "rope_type": kind, "factor": factor}
    if params["rope_type"] == "none":
        params["rope_type"] = "default"
    elif params["rope_type"] == "yarn":
        params |= _yarn(meta, params["factor"])
    elif params["rope_type"] != "linear":
        raise ConvertError(
            f"{meta.where}: '{meta.arch}.rope.scaling.type' {params['rope_type']!r} is not supported (supported: none, linear, yarn)"
        )
    return rope.build(
        {key: _decimal(value) if isinstance(value, float) else value for key, value in params.items()}, rotary, context, divisors
    )


def _yarn(meta: _Metadata, factor: Any) -> dict:
    """GGUF states a multiplier of the usual attention factor instead of the factor itself."""
    factor = rope.number({"factor": factor}, "factor", 1.0)
    usual = 1.0 if factor <= 1 else 0.1 * float(np.log(factor)) + 1.0
    return {
        "factor": factor,
        "original_max_position_embeddings": meta.get("rope.scaling.original_context_length"),
        "attention_factor": usual * meta.number("rope.scaling.attn_factor", 1.0),
        "beta_fast": meta.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": meta.get("rope.scaling.yarn_beta_slow"),
    }


# ---- parts ------------------------------------------------------------------------------------------------------


def _read_parts(path: str, files: list[RangeFile]) -> tuple[Header, list[Header]]:
    """The header with the metadata, and the headers of all parts, opened into files in the same order."""
    files.append(RangeFile(path))
    first = read_header(files[0])
    count = first.metadata.get("split.count", 1)
    if type(count) is not int or count <= 1:
        return first, [first]
    files.pop().close()
    match = re.fullmatch(r"(.*-)(\d{5})-of-(\d{5})(\.gguf)", path, re.DOTALL)
    if match is None or int(match[3]) != count:
        raise ConvertError(f"{shown(path)} is a part of {count}, but is not named like NAME-00001-of-{count:05d}.gguf")
    names = [f"{match[1]}{i:05d}-of-{match[3]}{match[4]}" for i in range(1, count + 1)]
    missing = [shown(name) for name in names if not os.path.exists(name)]
    if missing:
        raise ConvertError(f"{shown(path)} is a part of {count}; missing: {listed(missing)}")
    parts = []
    for name in names:
        files.append(RangeFile(name))
        parts.append(read_header(files[-1]))
    _check_parts(path, parts)
    return parts[0], parts


def _check_parts(path: str, parts: list[Header]) -> None:
    names: set[str] = set()
    for i, part in enumerate(parts):
        if part.metadata.get("split.no") != i or part.metadata.get("split.count") != len(parts):
            raise ConvertError(f"{shown(path)}: part {i + 1} says it is part {part.metadata.get('split.no')} (from 0) of another set")
        twice = names & part.tensors.keys()
        if twice:
            raise ConvertError(f"{shown(path)}: several parts hold the same tensors: {listed(twice)}")
        names |= part.tensors.keys()
    stated = parts[0].metadata.get("split.tensors.count", len(names))
    if stated != len(names):
        raise ConvertError(f"{shown(path)}: the parts hold {len(names)} tensors, but should hold {stated}")


# ---- tensors ----------------------------------------------------------------------------------------------------


def _divisors(infos: dict[str, tuple[RangeFile, TensorInfo]]) -> np.ndarray | None:
    if "rope_freqs.weight" not in infos:
        return None
    values = _open_tensor(*infos["rope_freqs.weight"]).vector().astype(np.float64)
    if not (values > 0).all():
        raise ConvertError("tensor rope_freqs.weight holds values that are not positive")
    return values


def _tensors(infos: dict[str, tuple[RangeFile, TensorInfo]]) -> tuple[dict[str, Tensor], list[str]]:
    tensors, extra = {}, []
    for name, (file, info) in infos.items():
        if _NAMES.fullmatch(name):
            tensors[name] = _open_tensor(file, info)
        elif name != "rope_freqs.weight" and not _SKIPPED.fullmatch(name):
            extra.append(name)
    return tensors, extra


def _undo_permutation(tensors: dict[str, Tensor], heads: int, kv_heads: int) -> None:
    """Files of the llama architecture hold the rows of q and k with the two halves of each head interleaved."""
    for name, tensor in tensors.items():
        part = name.split(".")[-2]
        count = {"attn_q": heads, "attn_k": kv_heads}.get(part)
        if count is not None and tensor.shape[0] % (2 * count) == 0:  # else the shape check refuses it
            pairs = np.arange(tensor.shape[0] // count).reshape(-1, 2)
            tensors[name] = Permuted(tensor, pairs.T.reshape(-1))


def _open_tensor(file: RangeFile, info: TensorInfo) -> Tensor:
    return {"Q8_0": Q8_0, "Q4_0": Q4_0, "Q4_1": Q4_1, "Q4_K": Q4_K}.get(info.type.name, GgufTensor)(file, info)


class GgufTensor(Tensor):
    """A tensor of any type the gguf package can dequantise."""

    def __init__(self, file: RangeFile, info: TensorInfo):
        block, size = GGML_QUANT_SIZES[info.type]
        super().__init__(info.name, info.shape, 8 * size / block)
        self._file, self._info = file, info
        try:
            dequantize(np.zeros((1, size), np.uint8), info.type)
        except NotImplementedError as error:
            raise ConvertError(f"{file.shown}: tensor {info.name} has type {info.type.name}, which is not supported") from error

    def _raw(self, start: int, stop: int) -> np.ndarray:
        """The bytes of rows; a vector is one row."""
        n = self.shape[0] if len(self.shape) == 2 else 1
        width = self._info.size // n
        return self._file.read(self._info.offset + start * width, (stop - start) * width).reshape(stop - start, width)

    def rows(self, start: int, stop: int) -> np.ndarray:
        with np.errstate(all="ignore"):  # bad scales give values that are refused by name when they are encoded
            return np.asarray(dequantize(self._raw(start, stop), self._info.type), np.float32)


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0]


class _Grouped(GgufTensor):
    """A type whose groups of 32 are those of q8 or q4: codes and scales are taken over as they are."""

    def _blocks(self, start: int, stop: int) -> np.ndarray:
        raw = self._raw(start, stop)
        return raw.reshape(len(raw), -1, GGML_QUANT_SIZES[self._info.type][1])

    def _scales(self, blocks: np.ndarray, at: int = 0) -> np.ndarray:
        scales = _halves(blocks, at)
        packing.require_finite(scales, self.name)
        return scales

    @staticmethod
    def _nibbles(blocks: np.ndarray, at: int) -> np.ndarray:
        packed = blocks[..., at : at + RUN // 2]
        return np.concatenate([packed & 15, packed >> 4], axis=-1)


class Q8_0(_Grouped):
    def encode(self, dtype: str, start: int, stop: int) -> Encoded:
        if dtype != "q8":
            return super().encode(dtype, start, stop)
        blocks = self._blocks(start, stop)
        codes, scales = blocks[..., 2:].view(np.int8), self._scales(blocks)
        if (codes == -128).any():
            codes, scales = _without_lowest(codes, scales, self.name)
        return codes.reshape(len(blocks), -1), scales


def _without_lowest(codes: np.ndarray, scales: np.ndarray, name: str) -> Encoded:
    """Groups that use the code -128, which q8 does not have: halved codes of twice the scale where that is exact, else
    quantised anew."""
    codes, scales = codes.copy(), scales.copy()
    rows, groups = np.nonzero((codes == -128).any(axis=-1))
    old, step = codes[rows, groups], scales[rows, groups]
    with np.errstate(over="ignore"):
        twice = step * np.float16(2)
    exact = (old % 2 == 0).all(axis=-1) & np.isfinite(twice)
    new, new_step = packing.encode(old.astype(np.float32) * step.astype(np.float32)[:, None], "q8", name)
    codes[rows, groups] = np.where(exact[:, None], old // 2, new)
    scales[rows, groups] = np.where(exact, twice, new_step[:, 0])
    return codes, scales


class Q4_0(_Grouped):
    def encode(self, dtype: str, start: int, stop: int) -> Encoded:
        if dtype not in ("q8", "q4"):
            return super().encode(dtype, start, stop)
        blocks = self._blocks(start, stop)
        nibbles, scales = self._nibbles(blocks, 2).reshape(len(blocks), -1), self._scales(blocks)
        if dtype == "q8":
            return nibbles.astype(np.int8) - np.int8(8), scales
        with np.errstate(over="ignore"):
            minimums = scales * np.float16(-8)
        if np.isinf(minimums).any():
            raise ConvertError(f"tensor {self.name} holds a scale of {float(np.abs(scales).max()):g}, which does not fit q4")
        return nibbles, scales, minimums


class Q4_1(_Grouped):
    def encode(self, dtype: str, start: int, stop: int) -> Encoded:
        if dtype not in ("q8", "q4"):
            return super().encode(dtype, start, stop)
        blocks = self._blocks(start, stop)
        if dtype == "q8":
            return encode_q8_levels(self.rows(start, stop), self._scales(blocks), self.name)
        return self._nibbles(blocks, 4).reshape(len(blocks), -1), self._scales(blocks), self._scales(blocks, 2)


class Q4_K(_Grouped):
    """Groups of 32 codes like those of q4. A group's scale and minimum are products of a half and six bits, so that rounding
    them to halves is the only loss; quantising anew would move the codes as well."""

    def encode(self, dtype: str, start: int, stop: int) -> Encoded:
        if dtype != "q4":
            return super().encode(dtype, start, stop)
        blocks = self._blocks(start, stop)
        n = len(blocks)
        low = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
        steps = np.concatenate([low[0] & 63, (low[2] & 15) | (low[0] >> 6 << 4)], axis=-1)
        drops = np.concatenate([low[1] & 63, (low[2] >> 4) | (low[1] >> 6 << 4)], axis=-1)
        scales = self._half(self._scales(blocks)[..., None].astype(np.float32) * steps)
        minimums = self._half(-self._scales(blocks, 2)[..., None].astype(np.float32) * drops)
        quarters = blocks[..., 16:].reshape(n, -1, 1, RUN)
        codes = np.concatenate([quarters & 15, quarters >> 4], axis=2)
        return codes.reshape(n, -1), scales.reshape(n, -1), minimums.reshape(n, -1)

    def _half(self, values: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            halves = values.astype(np.float16)
        if np.isinf(halves).any():
            raise ConvertError(f"tensor {self.name} holds a scale of {float(np.abs(values).max()):g}, which does not fit q4")
        return halves
