# SPDX-License-Identifier: Apache-2.0
"""What the commands share: options of the engine and of sampling, output, the one-line summary."""
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from ..load import load
from ..model import ISA_LEVELS, Model
from ..result import Result
from ..session import KV_FORMATS
from ..sizes import format_size, parse_size


def checked(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argparse type whose complaint is the library's own text."""

    def parse(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL",
                        help="model file (.hsr), or a Hugging Face folder or .gguf file, converted once into a cache")


def add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--threads", type=int, default=0, metavar="N",
                       help="threads that compute; 0: as many as this process may use (default: 0)")
    group.add_argument("--isa", choices=ISA_LEVELS, default="auto", help="highest instruction set to use (default: auto)")
    group.add_argument("--ram", type=checked(parse_size), metavar="SIZE",
                       help="budget of the key-value memory, such as 4GiB (default: half of the memory available)")
    group.add_argument("--kv", choices=KV_FORMATS, default="auto",
                       help="key-value format; auto is f32 for f32 models, else bf16 (default: auto)")


def add_context(parser: argparse.ArgumentParser, default: str) -> None:
    group = parser.add_argument_group("context")
    group.add_argument("--context", type=int, metavar="N", help=f"most tokens of the session (default: {default})")
    group.add_argument("--beyond-trained", action="store_true", help="allow a context above the length the model was trained for")


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=max_tokens, metavar="N", help="tokens to generate at most (default: %(default)s)")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 takes the most likely token (default: %(default)s)")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K most likely tokens; 0 is off (default: %(default)s)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P",
                       help="keep the most likely tokens that hold this probability; 1 is off (default: %(default)s)")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P",
                       help="drop tokens less likely than this share of the best; 0 is off (default: %(default)s)")
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R",
                       help="weaken tokens seen before; 1 is off (default: %(default)s)")
    group.add_argument("--seed", type=int, metavar="S", help="0 to 2^64-1; the same seed draws the same tokens (default: a new one)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="text that ends the output; may be given several times")


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "max_tokens": args.max_tokens, "temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty, "seed": args.seed, "stop": args.stop,
    }


def open_model(args: argparse.Namespace) -> Model:
    return load(args.model, threads=args.threads, isa=args.isa, ram=args.ram, kv=args.kv)


def say(text: str) -> None:
    """One line for people, on stderr."""
    if sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)


def write(text: str) -> None:
    """Output, at once. Characters that the terminal cannot show become question marks."""
    if sys.stdout is not None:
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()


def rate(tokens: int, seconds: float) -> float | None:
    """Tokens per second; None where there is nothing to divide."""
    return tokens / seconds if tokens > 0 and seconds > 0 else None


def rates(result: Result) -> tuple[float | None, float | None]:
    """Prefill and decode speed. Decoding is timed from the first token to the last."""
    return rate(result.prefill_tokens, result.prefill_seconds), rate(len(result.tokens) - 1, result.decode_seconds)


def summary(result: Result) -> str:
    prefill, decode = (f"{value:.1f}" if value else "-" for value in rates(result))
    return (f"prompt {result.prompt_tokens} tokens, generated {len(result.tokens)} ({result.finish_reason}), "
            f"prefill {prefill} tok/s, decode {decode} tok/s, KV {format_size(result.kv_bytes)}")
