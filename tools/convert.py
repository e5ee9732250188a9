# SPDX-License-Identifier: Apache-2.0
"""Conversion of a Hugging Face folder or a GGUF file into a `.hsr` file (docs/model-file.md)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from . import packing, source_gguf, source_hf, spec
from .errors import ConvertError, shown
from .files import fingerprint
from .hsr_file import FORMAT_VERSION, HsrWriter, OutTensor
from .packing import DTYPES, PANEL, RUN
from .rope import Rope
from .spec import Source
from .tensors import Paired, Stacked, Tensor

__all__ = ["ConvertError", "ConvertReport", "convert"]

Path = str | bytes | os.PathLike
Progress = Callable[[int, int, str], None]

_CHUNK = 1 << 22  # weights in memory at once
_MAX_EOS = 16


@dataclass(frozen=True)
class ConvertReport:
    """What was written. source is the fingerprint of what it was made of."""

    arch: str
    dtype: str
    tensors: int
    bytes: int
    seconds: float
    warnings: tuple[str, ...]
    source: str


def convert(
    src: Path,
    dst: Path,
    dtype: str = "q8",
    *,
    progress: Progress | None = None,
    skip_unknown: bool = False,
    allow_unknown_pretokenizer: bool = False,
) -> ConvertReport:
    """Convert src to the file dst, which appears only when it is whole.

    dtype: f32, bf16, q8 or q4. progress: called with (bytes done, bytes in all, tensor name). skip_unknown: leave out tensors
    that have no place in the model instead of refusing the source. allow_unknown_pretokenizer: take a GGUF file whose way to
    split text is not known. Anything wrong is a ConvertError that names the culprit, and leaves no output."""
    began = time.monotonic()
    if dtype not in DTYPES:
        raise ConvertError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    source_path, path = _name("source", src), _name("destination", dst)
    if os.path.islink(path):
        path = os.path.realpath(path)  # the file it leads to is replaced, not the link
    _check_destination(path)
    source = _open(source_path, allow_unknown_pretokenizer)
    try:
        _refuse_own_source(path, source)
        spec.check(source, skip_unknown)
        _settle_head(source)
        plan = _plan(source, dtype)
        mark = fingerprint(source.files)
        with HsrWriter(path) as writer:
            writer.begin(_metadata(source, dtype, mark), [out for out, _ in plan])
            _write_all(writer, plan, progress)
            size = writer.commit()
    finally:
        source.close()
    return ConvertReport(source.arch, dtype, len(plan), size, time.monotonic() - began, tuple(source.warnings), mark)


def _name(role: str, path: Path) -> str:
    name = os.fsdecode(path)
    if not name or "\0" in name:
        raise ConvertError(f"the name of the {role} {'has a NUL character in it' if name else 'is empty'}")
    return name


def _check_destination(path: str) -> None:
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise ConvertError(f"cannot write {shown(path)}: there is no folder {shown(folder)}")
    if os.path.isdir(path) or not os.path.basename(path):
        raise ConvertError(f"cannot write {shown(path)}: it is a folder")
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConvertError(f"cannot write {shown(path)}: it is not a regular file")


def _open(path: str, allow_unknown_pretokenizer: bool) -> Source:
    if os.path.isdir(path):
        return source_hf.open_source(path)
    if not os.path.exists(path):
        raise ConvertError(f"there is no file or folder {shown(path)}")
    if not os.path.isfile(path):
        raise ConvertError(f"{shown(path)} is neither a folder nor a regular file")
    return source_gguf.open_source(path, allow_unknown_pretokenizer)


def _refuse_own_source(path: str, source: Source) -> None:
    for file in source.files:
        if os.path.exists(path) and os.path.samefile(path, file.path):
            raise ConvertError(f"the destination {shown(path)} is a file of the source")


def _settle_head(source: Source) -> None:
    """Where the embedding is said to be the head, a head in the file is stored only if it really is another matrix."""
    if source.tied and "output.weight" in source.tensors:
        head, embedding = source.tensors["output.weight"], source.tensors["token_embd.weight"]
        if _same_values(head, embedding):
            del source.tensors["output.weight"]
        else:
            source.warnings.append(
                f"tie_word_embeddings is true, but {head.name} differs from {embedding.name}; the file's own head is used"
            )


def _same_values(a: Tensor, b: Tensor) -> bool:
    return all(np.array_equal(a.rows(start, stop), b.rows(start, stop)) for start, stop in _chunks(a.shape))


# ---- plan -------------------------------------------------------------------------------------------------------

Plan = list[tuple[OutTensor, Tensor | np.ndarray]]


def _plan(source: Source, dtype: str) -> Plan:
    """Every tensor to be written and what it is made of, in the order of the file."""
    get, keep = source.tensors, _keeps_q8(source)
    plan: Plan = []

    def matrix(name: str, tensor: Tensor, kind: str) -> None:
        plan.append((OutTensor(name, tensor.shape, kind), tensor))

    def vector(name: str, value: Tensor | np.ndarray) -> None:
        plan.append((OutTensor(name, value.shape, None), value))

    matrix("token_embd.weight", get["token_embd.weight"], _vocabulary_dtype(get["token_embd.weight"], dtype))
    for i in range(source.layer_count):
        layer = f"blk.{i}."
        for part in ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm"):
            if f"{layer}{part}.weight" in get:
                vector(f"{layer}{part}.weight", get[f"{layer}{part}.weight"])
        for group, parts in spec.BIAS_GROUPS.items():
            weight = _joined(group, [get[f"{layer}{part}.weight"] for part in parts])
            matrix(f"{layer}{group}.weight", weight, "q8" if dtype == "q4" and keep and weight.bits >= 8 else dtype)
            if source.has_bias(group):
                vector(f"{layer}{group}.bias", _joined(group, [get[f"{layer}{part}.bias"] for part in parts]))
    vector("output_norm.weight", get["output_norm.weight"])
    vector("rope.inv_freq", source.rope.inv_freq)
    if source.rope.inv_freq_long is not None:
        vector("rope.inv_freq_long", source.rope.inv_freq_long)
    if "output.weight" in get:
        matrix("output.weight", get["output.weight"], _vocabulary_dtype(get["output.weight"], dtype))
    return plan


def _joined(group: str, parts: list[Tensor]) -> Tensor:
    if group == "ffn_gate_up":
        return Paired(*parts)
    return Stacked(parts) if len(parts) > 1 else parts[0]


def _vocabulary_dtype(tensor: Tensor, dtype: str) -> str:
    """Embedding and head of a q4 file stay at q8 unless the source has no more than four bits (and scales) of them."""
    return "q8" if dtype == "q4" and tensor.bits > 5 else dtype


def _keeps_q8(source: Source) -> bool:
    """A source of four-bit projections in which some have eight bits or more was made so on purpose; those become q8."""
    return any(tensor.bits <= 5 for name, tensor in source.tensors.items() if name.startswith("blk.") and len(tensor.shape) == 2)


def _metadata(source: Source, dtype: str, mark: str) -> dict:
    tokenizer, rows = source.tokenizer, source.vocab_size
    if len(tokenizer.eos) > _MAX_EOS:
        raise ConvertError(f"{source.where}: {len(tokenizer.eos)} end-of-text ids, more than the {_MAX_EOS} a model file can hold")
    values = {
        "general.name": source.name,
        "hisparse.format_version": FORMAT_VERSION,
        "hisparse.arch": source.arch,
        "hisparse.weight_dtype": dtype,
        "hisparse.source": mark,
        "hisparse.vocab_size": rows,
        "hisparse.tokenizer_size": rows if tokenizer.size is None else tokenizer.size,
        "hisparse.hidden_size": source.hidden_size,
        "hisparse.intermediate_size": source.intermediate_size,
        "hisparse.layer_count": source.layer_count,
        "hisparse.head_count": source.head_count,
        "hisparse.kv_head_count": source.kv_head_count,
        "hisparse.head_dim": source.head_dim,
        "hisparse.rotary_dim": source.rope.rotary_dim,
        "hisparse.context_length": source.context_length,
        "hisparse.rms_norm_eps": float(source.rms_norm_eps),
        "hisparse.attention_scale": float(source.attention_scale),
        **_rope_metadata(source.rope),
        "hisparse.bos_token_id": tokenizer.bos,
        "hisparse.eos_token_ids": tokenizer.eos or None,
        "tokenizer.huggingface.json": tokenizer.json,
        "tokenizer.chat_template": tokenizer.chat_template,
        "hisparse.special_tokens": json.dumps(tokenizer.special_tokens, ensure_ascii=False),
        "hisparse.generation": json.dumps(tokenizer.generation) if tokenizer.generation else None,
    }
    return {key: value for key, value in values.items() if value is not None}


def _rope_metadata(rope: Rope) -> dict:
    return {
        "hisparse.rope.kind": rope.kind,
        "hisparse.rope.attention_factor": float(rope.attention_factor),
        "hisparse.rope.base": rope.base,
        "hisparse.rope.factor": rope.factor,
        "hisparse.rope.original_context": rope.original_context,
    }


# ---- writing ----------------------------------------------------------------------------------------------------


def _chunks(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Row ranges of about _CHUNK weights, whole pairs of panels each."""
    step = max(_CHUNK // packing.padded(shape[1], RUN) // (2 * PANEL), 1) * 2 * PANEL
    return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def _write_all(writer: HsrWriter, plan: Plan, progress: Progress | None) -> None:
    done, total = 0, sum(out.size for out, _ in plan)
    for out, value in plan:
        for size in _write_tensor(writer, out, value):
            done += size
            if progress is not None:
                progress(done, total, out.name)


def _write_tensor(writer: HsrWriter, out: OutTensor, value: Tensor | np.ndarray):
    """Write one tensor piece by piece, yielding the bytes of each piece."""
    if out.dtype is None:
        values = value.vector() if isinstance(value, Tensor) else value
        writer.write(out.name, 0, values.astype(np.float32))
        yield out.size
        return
    n, k = out.shape
    tail_start = packing.code_bytes(out.dtype, n, k)
    for start, stop in _chunks(out.shape):
        codes, tail = packing.pack(value.encode(out.dtype, start, stop), out.dtype)
        writer.write(out.name, packing.code_bytes(out.dtype, start, k), codes)
        if len(tail):
            writer.write(out.name, tail_start + packing.tail_bytes(out.dtype, start, k), tail)
        yield codes.nbytes + tail.nbytes
