# SPDX-License-Identifier: Apache-2.0
"""generate: answer a prompt."""
from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from .. import progress
from ..generate import start
from ..model import Model
from ..result import Result
from . import common

HELP = "answer a prompt, or continue a text with --raw"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model(parser)
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt (default: read from standard input)")
    parser.add_argument("--system", metavar="TEXT", help="system prompt for the chat template")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the model's chat template")
    parser.add_argument("--prompt-cache", metavar="FILE",
                        help="keep the computed prompt in FILE: another prompt that begins alike, such as another question about the same "
                             "document, computes only what differs")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of streaming")
    common.add_sampling(parser, max_tokens=256)
    common.add_context(parser, "prompt and --max-tokens, at most the trained length")
    common.add_engine(parser)
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    if args.raw and args.system is not None:
        args.usage_error("--system is for the chat template, which --raw leaves out")
    common.check_no_stdout(args.prompt_cache)
    prompt = _read_prompt(args) if args.prompt is None else args.prompt
    with common.open_model(args) as model, progress.bar("reading the prompt", "tok") as report:
        stream = start(
            model, prompt if args.raw else model.chat_ids(prompt, system=args.system), progress=report, context=args.context,
            beyond_trained=args.beyond_trained, prompt_cache=args.prompt_cache, **common.sampling_options(args),
        )
        with stream:
            for piece in stream:
                if not args.json:
                    common.write(piece)
        result = stream.result
        if args.json:
            common.write(json.dumps(_report(model, result)) + "\n")
        else:
            common.write("\n")
            common.say(common.summary(result))
    return 0


def _read_prompt(args: argparse.Namespace) -> str:
    if sys.stdin is None:
        args.usage_error("no prompt: give -p TEXT, or text on standard input")
    common.lenient_input()
    return sys.stdin.read()


def _report(model: Model, result: Result) -> dict[str, Any]:
    prefill, decode = common.rates(result)
    stats = model.stats()
    return {
        "text": result.text, "tokens": list(result.tokens), "finish_reason": result.finish_reason, "stop": result.stop, "seed": result.seed,
        "prompt_tokens": result.prompt_tokens, "prefill_tokens_per_second": prefill, "decode_tokens_per_second": decode,
        "kv_bytes": result.kv_bytes, "isa": stats.isa, "threads": stats.n_threads, "dtype": model.info.dtype,
    }
