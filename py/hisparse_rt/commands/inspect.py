# SPDX-License-Identifier: Apache-2.0
"""inspect: what a model file holds and what it costs to run."""
from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from typing import Any

from ..errors import HisparseError
from ..model import Model
from ..sizes import format_size
from . import common

HELP = "show a model's hyper-parameters, sizes and tokenizer"

_PAGE_TOKENS = 64
_BLOCK_BYTES = 1 << 20
_HEADER_BYTES = 64
_SLOT_UNIT = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    common.add_engine(parser)


def run(args: argparse.Namespace) -> int:
    with common.open_model(args) as model:
        facts = collect(model, args.kv)
    common.write(json.dumps(facts, ensure_ascii=False) + "\n" if args.json else _table(facts))
    return 0


def collect(model: Model, kv: str) -> dict[str, Any]:
    """All facts as one JSON-like object."""
    info, stats = model.info, model.stats()
    kv = kv if kv != "auto" else "f32" if info.dtype == "f32" else "bf16"
    heads, head_bytes = info.n_layers * info.n_kv_heads, 2 * info.head_dim * (4 if kv == "f32" else 2)
    return {
        "path": model.path, "name": model.metadata("general.name"), "arch": info.arch, "source": model.metadata("hisparse.source"),
        "parameters": info.n_params, "weight_dtype": info.dtype,
        "weight_bytes": info.weight_bytes, "weight_bytes_by_dtype": _by_dtype(model.file),
        "layers": info.n_layers, "hidden_size": info.hidden_size,
        "heads": info.n_heads, "kv_heads": info.n_kv_heads, "head_dim": info.head_dim,
        "vocab_size": info.vocab_size, "context_length": info.context_length,
        "kv_format": kv, "kv_bytes_per_token": heads * head_bytes, "kv_budget_bytes": stats.hot_blocks_total * _BLOCK_BYTES,
        "largest_context": largest_context(heads, head_bytes, stats.hot_blocks_total),
        "isa": stats.isa, "threads": stats.n_threads,
        "tokenizer": _tokenizer(model), "generation_defaults": model.generation_defaults,
    }


def largest_context(heads: int, head_bytes: int, blocks: int) -> int:
    """Tokens of one session that fit in `blocks` blocks. heads: key-value heads of all layers; head_bytes: of one token in one."""
    slot = -(-(_HEADER_BYTES + _PAGE_TOKENS * head_bytes) // _SLOT_UNIT) * _SLOT_UNIT
    return blocks * (_BLOCK_BYTES // slot) // heads * _PAGE_TOKENS


def _by_dtype(path: bytes) -> dict[str, int] | None:
    from ..tools.files import RangeFile
    from ..tools.gguf_header import read_header

    sizes: Counter[str] = Counter()
    file = RangeFile(os.fsdecode(path))
    try:
        for tensor in read_header(file).tensors.values():
            sizes[{"F32": "f32", "BF16": "bf16", "Q8_0": "q8", "Q4_1": "q4"}.get(tensor.type.name, tensor.type.name)] += tensor.size
    finally:
        file.close()
    return dict(sizes)


def _tokenizer(model: Model) -> dict[str, Any] | None:
    try:
        codec = model._codec
    except HisparseError as error:
        return {"error": str(error)}
    return {
        "tokens": codec.tokenizer.get_vocab_size(with_added_tokens=True),
        "prefix": [_spelled(model, token) for token in codec.prefix],
        "eos": [_spelled(model, token) for token in model.info.eos_tokens],
        "chat_template": model.metadata("tokenizer.chat_template") is not None,
    }


def _spelled(model: Model, token: int) -> dict[str, Any]:
    return {"id": token, "text": model.tokenizer.id_to_token(token)}


def _table(facts: dict[str, Any]) -> str:
    tokenizer = facts["tokenizer"] or {}
    by_dtype = ", ".join(f"{name} {format_size(size)}" for name, size in sorted((facts["weight_bytes_by_dtype"] or {}).items()))
    names = {key: ", ".join(f"{item['text']} ({item['id']})" for item in tokenizer.get(key, ())) or "none" for key in ("prefix", "eos")}
    rows = [
        ("file", facts["path"]),
        ("model", f"{facts['name'] or '-'}, {facts['arch']}, {facts['parameters']:,} parameters"),
        ("weights", f"{facts['weight_dtype']}, {format_size(facts['weight_bytes'])} ({by_dtype})"),
        ("shape", f"{facts['layers']} layers, hidden {facts['hidden_size']}, {facts['heads']} heads, "
                  f"{facts['kv_heads']} kv heads of {facts['head_dim']}"),
        ("vocabulary", f"{facts['vocab_size']:,}"),
        ("trained context", f"{facts['context_length']:,} tokens"),
        ("KV", f"{facts['kv_format']}, {format_size(facts['kv_bytes_per_token'])} per token"),
        ("KV budget", f"{format_size(facts['kv_budget_bytes'])}: one session of up to {facts['largest_context']:,} tokens"),
        ("tokenizer", tokenizer.get("error") or
                      f"{tokenizer['tokens']:,} tokens; begins with: {names['prefix']}; ends with: {names['eos']}; "
                      f"chat template: {'yes' if tokenizer['chat_template'] else 'no'}"),
        ("sampling advice", json.dumps(facts["generation_defaults"]) if facts["generation_defaults"] else "none"),
        ("engine", f"{facts['isa']}, {facts['threads']} threads"),
        ("source", facts["source"] or "-"),
    ]
    return "".join(f"{name:16}{value}\n" for name, value in rows)
