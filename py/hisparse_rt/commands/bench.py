# SPDX-License-Identifier: Apache-2.0
"""bench: prefill and decode speed at several depths."""
from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ContextError, HisparseError, InvalidError
from ..model import Model
from . import common

HELP = "measure prefill and decode speed"


def _depths(text: str) -> list[int]:
    try:
        depths = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r} is not a list of token counts, such as 512,2048") from None
    if min(depths) < 1 or max(depths) >= 1 << 31:
        raise ValueError(f"a depth is from 1 to {(1 << 31) - 1} tokens")
    return depths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model(parser)
    parser.add_argument("--depths", type=common.checked(_depths), default=[512, 2048], metavar="N,N",
                        help="tokens already in the session (default: 512,2048)")
    parser.add_argument("--decode-tokens", type=common.whole(2), default=32, metavar="N",
                        help="tokens to decode at each depth, at least 2 (default: %(default)s)")
    parser.add_argument("--repeats", type=common.whole(1), default=3, metavar="N",
                        help="runs of each measurement; medians are reported (default: %(default)s)")
    parser.add_argument("--chunk", type=common.whole(1, 4096), default=512, metavar="N",
                        help="prompt tokens per step (default: %(default)s)")
    parser.add_argument("--text", metavar="FILE", help="text to use as the prompt (default: Python's own standard library)")
    parser.add_argument("--json", metavar="FILE", help="also write the results to FILE; - is standard output")
    parser.add_argument("--beyond-trained", action="store_true", help="allow depths above the length the model was trained for")
    common.add_engine(parser)


def run(args: argparse.Namespace) -> int:
    from ..load import load

    if args.json not in (None, "-"):
        common.check_output(args.json, sources=(args.model,))

    with load(args.model, threads=args.threads, isa=args.isa, ram=args.ram, kv=args.kv, chunk=args.chunk) as model:
        deepest = max(args.depths) + args.decode_tokens
        if deepest > model.info.context_length and not args.beyond_trained:
            raise ContextError(f"depth {max(args.depths)} and {args.decode_tokens} tokens more pass the {model.info.context_length} tokens "
                               "the model was trained for; --beyond-trained allows it")
        ids = _prompt(model, max(args.depths), args.text)
        stats = model.stats()
        common.say(f"{model.info.arch} {model.info.dtype}, {model.info.n_params / 1e6:.0f}M parameters; "
                   f"{stats.isa}, {stats.n_threads} threads; median of {args.repeats}")
        results = [_measure(model, ids[:depth], args) for depth in args.depths]
    report = {
        "model": model.path, "arch": model.info.arch, "dtype": model.info.dtype, "parameters": model.info.n_params,
        "isa": stats.isa, "threads": stats.n_threads, "chunk": args.chunk, "repeats": args.repeats,
        "decode_tokens": args.decode_tokens, "cpu": _cpu_name(), "results": results,
    }
    if args.json == "-":
        common.write(json.dumps(report, indent=1) + "\n")
    else:
        common.write("depth  prefill tok/s  decode tok/s\n" + "".join(
            f"{row['depth']:<7}{row['prefill_tokens_per_second']:<15.1f}{row['decode_tokens_per_second']:.1f}\n" for row in results))
        if args.json:
            with common.output_file(args.json, sources=(args.model,)) as file:
                file.write(json.dumps(report, indent=1).encode() + b"\n")
    return 0


def _measure(model: Model, ids: npt.NDArray[np.int32], args: argparse.Namespace) -> dict[str, Any]:
    prefill: list[float] = []
    decode: list[float] = []
    for _ in range(args.repeats):
        with model.session(context=len(ids) + args.decode_tokens, beyond_trained=args.beyond_trained) as session:
            session.append(ids)
            began = time.perf_counter()
            session.prefill()
            prefill.append(len(ids) / (time.perf_counter() - began))
            result = session.generate(max_tokens=args.decode_tokens, ignore_eos=True, return_details=True)
            decode.append((len(result.tokens) - 1) / result.decode_seconds)
            kv_format, kv_bytes = session.stats().kv_format, result.kv_bytes
    return {
        "depth": len(ids), "prefill_tokens_per_second": statistics.median(prefill), "decode_tokens_per_second": statistics.median(decode),
        "prefill_runs": prefill, "decode_runs": decode, "kv_format": kv_format, "kv_bytes": kv_bytes,
    }


def _prompt(model: Model, n: int, name: str | None) -> npt.NDArray[np.int32]:
    """n ids of real text: speed must not profit from a prompt no model would see."""
    try:
        text = Path(name).read_text("utf-8") if name is not None else _library_text(n)
    except UnicodeDecodeError as error:
        raise InvalidError(f"{name} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    try:
        ids = model.encode(text)
    except HisparseError as error:
        raise InvalidError(f"bench needs the model's tokenizer: {error}") from error
    if not ids.size:
        raise InvalidError(f"{name}: the text is empty")
    return np.resize(ids, n)


def _library_text(n: int) -> str:
    folder, text = Path(argparse.__file__).parent, ""
    for path in sorted(folder.glob("*.py")):
        text += path.read_text("utf-8", "replace")
        if len(text) > 8 * n:  # a token is rarely longer
            break
    return text


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
