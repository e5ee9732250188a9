# SPDX-License-Identifier: Apache-2.0
"""inspect: what a model file holds and what it costs to run."""
from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from ..errors import HisparseError
from ..model import Model
from ..plan import Plan, plan
from ..sizes import format_size
from . import common

HELP = "show a model's hyper-parameters, sizes and tokenizer"

_PAGE_TOKENS = 64
_BLOCK_BYTES = 1 << 20
_LONGEST = (1 << 31) - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    common.add_engine(parser)


def run(args: argparse.Namespace) -> int:
    if args.calibration is None and (os.path.isdir(args.model) or args.model.lower().endswith(".gguf")):
        args.calibration = False  # looking needs none, and a conversion would take minutes to make one
    with common.open_model(args) as model:
        facts = collect(model, args)
    common.write(json.dumps(facts, ensure_ascii=False) + "\n" if args.json else _table(facts))
    return 0


def collect(model: Model, args: argparse.Namespace) -> dict[str, Any]:
    """All facts as one JSON-like object."""
    info, stats = model.info, model.stats()
    planned = planner(model, kv=args.kv, profile=args.profile, cold=args.cold, cold_size=args.cold_size)
    return {
        "path": model.path, "name": model.metadata("general.name"), "arch": info.arch, "source": model.metadata("hisparse.source"),
        "parameters": info.n_params, "weight_dtype": info.dtype,
        "weight_bytes": info.weight_bytes, "weight_bytes_by_dtype": _by_dtype(model.file),
        "layers": info.n_layers, "hidden_size": info.hidden_size,
        "heads": info.n_heads, "kv_heads": info.n_kv_heads, "head_dim": info.head_dim,
        "vocab_size": info.vocab_size, "context_length": info.context_length,
        "kv_format": planned(1).kv_format, "kv_bytes_per_token": bytes_per_token(planned),
        "kv_budget_bytes": stats.hot_blocks_total * _BLOCK_BYTES, "largest_context": largest_context(planned),
        "isa": stats.isa, "threads": stats.n_threads,
        "tokenizer": _tokenizer(model), "generation_defaults": model.generation_defaults,
    }


def planner(model: Model, *, kv: str, profile: str, cold: str | None = None, cold_size: int | None = None) -> Callable[[int], Plan]:
    """A function that plans one session of so many tokens in this engine."""
    ram, chosen = model.stats().hot_blocks_total * _BLOCK_BYTES, 0 if profile == "exact" else profile
    return lambda context: plan(model.file, context=context, kv=kv, profile=chosen, calibrated=model.calibrated, beyond_trained=True,
                                ram=ram, cold=cold, cold_size=cold_size, chunk=model.chunk)


def bytes_per_token(planned: Callable[[int], Plan]) -> int:
    """What one more token of a long session takes, as pages are stored: rounded up to whole slots."""
    few, many = planned(_LONGEST // 4), planned(_LONGEST // 2)
    return round((many.plain_bytes + many.sealed_bytes - few.plain_bytes - few.sealed_bytes) / (many.context - few.context))


def largest_context(planned: Callable[[int], Plan]) -> int:
    """Tokens of the longest session that is admitted, in whole pages."""
    low, high = 0, _LONGEST // _PAGE_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if planned(middle * _PAGE_TOKENS).fits else (low, middle - 1)
    return low * _PAGE_TOKENS


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
