# SPDX-License-Identifier: Apache-2.0
"""What the commands share: options of the engine and of sampling, output, the one-line summary."""
from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import HisparseError, InvalidError, from_os_error
from ..load import load
from ..model import IMPORTANCES, IO_ENGINES, ISA_LEVELS, PREFETCH_SOURCES, READABLE, Model, check_budget
from ..result import Result
from ..session import KV_FORMATS
from ..sizes import format_size
from ..tools.new_file import NewFile


def checked(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argparse type whose complaint is the library's own text."""

    def parse(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


_COUNT = re.compile(r"\s*(-?\d+)\s*([KkMm]?)\s*", re.ASCII)


def count(text: str) -> int:
    """A whole number as people write counts of tokens: 512, 64K (of 1024), 1M (of 1024 K). ValueError if it is none."""
    match = _COUNT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a whole number, such as 512 or 64K")
    return int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[match[2].upper()]


def counts(low: int, high: int = (1 << 31) - 1) -> Callable[[str], list[int]]:
    """An argparse type: whole numbers from low to high, separated by commas."""
    one = whole(low, high)
    return lambda text: [one(part) for part in text.split(",")]


def names(known: Collection[str]) -> Callable[[str], list[str]]:
    """An argparse type: some of the known names, separated by commas, or none."""

    def parse(text: str) -> list[str]:
        given = [name for name in text.split(",") if name]
        for name in given:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return given

    return parse


def whole(low: int, high: int = (1 << 31) - 1) -> Callable[[str], int]:
    """An argparse type: a whole number from low to high."""

    def parse(text: str) -> int:
        try:
            value = count(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not allowed, the value must be from {low} to {high}")
        return value

    return parse


def real(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """An argparse type: a finite number from low to high; above: low itself is too low."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not (math.isfinite(value) and low <= value <= high) or (above and value == low):
            limits = f"{'above' if above else 'at least'} {low:g}" + (f" and at most {high:g}" if high < math.inf else "")
            raise argparse.ArgumentTypeError(f"{text} is not allowed, the value must be {limits}")
        return value

    return parse


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL",
                        help="model file (.hsr), or a Hugging Face folder or .gguf file, converted once into a cache")


def add_machine(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """What any computing may be told."""
    group = parser.add_argument_group("engine")
    group.add_argument("--threads", type=whole(0, 1024), default=0, metavar="N",
                       help="threads that compute; 0: as many as this process may use (default: 0)")
    group.add_argument("--isa", choices=ISA_LEVELS, default="auto", help="highest instruction set to use (default: auto)")
    group.add_argument("--ram", type=checked(check_budget), metavar="SIZE",
                       help="budget of the key-value memory, such as 4GiB (default: half of the memory available)")
    return group


def add_engine(parser: argparse.ArgumentParser) -> None:
    group = add_machine(parser)
    group.add_argument("--hot", type=checked(check_budget), metavar="SIZE", help="with --warm, in place of --ram: memory for pages in use")
    group.add_argument("--warm", type=checked(check_budget), metavar="SIZE", help="memory for other pages; on the CPU one pool with --hot")
    group.add_argument("--cold", metavar="DIR", help="directory for pages that memory does not hold, best on NVMe (default: none)")
    group.add_argument("--cold-size", type=checked(check_budget), metavar="SIZE",
                       help="most that the file in it may take (default: half of what is free there)")
    group.add_argument("--readable-tiers", choices=tuple(READABLE), default="all",
                       help="hot: attention does not read --warm in place, pages move, as they would on a GPU (default: all)")
    group.add_argument("--io", choices=tuple(IO_ENGINES), default="auto",
                       help="how the cold file is read and written: io_uring, or threads with pread (default: auto)")
    group.add_argument("--importance", choices=tuple(IMPORTANCES), default="balanced",
                       help="which pages stay in memory; summarize: near ones, chat: those attended most (default: balanced)")
    group.add_argument("--prefetch", type=whole(0, 4096), default=4, metavar="N",
                       help="groups of pages that are read from the cold file ahead of need; 0: none (default: 4)")
    group.add_argument("--prefetch-sources", type=names(PREFETCH_SOURCES), metavar="NAME,NAME",
                       help="why pages are read from the cold file before they are needed: groups, rising, query; the last reads what the "
                            "next layer is guessed to select, half of which was measured to be wasted (default: groups,rising)")
    group.add_argument("--kv", choices=KV_FORMATS, default="auto",
                       help="key-value format; auto is f32 for f32 models, else bf16, or int8 where a sparse profile finds no calibration "
                            "(default: auto)")
    group.add_argument("--profile", default="exact", metavar="NAME|FILE",
                       help="how to attend: a preset (exact, balanced, fast, long-document, chat, classic) or a JSON file of settings, "
                            'such as {"preset": "fast", "late": "estimate"}, which does not wait for pages in cold storage '
                            "(default: exact, which is dense)")
    group.add_argument("--calibration", metavar="FILE",
                       help="calibration of the model (default: MODEL with the ending .hsrcal, if there is one)")
    group.add_argument("--no-calibrate", dest="calibration", action="store_const", const=False,
                       help="use no calibration, and make none where MODEL is converted first")


def add_context(parser: argparse.ArgumentParser, default: str) -> None:
    group = parser.add_argument_group("context")
    group.add_argument("--context", type=whole(1), metavar="N", help=f"most tokens of the session (default: {default})")
    group.add_argument("--beyond-trained", action="store_true", help="allow a context above the length the model was trained for")


def _stop(text: str) -> str:
    if not text:
        raise ValueError("an empty text would end every output at once")
    return text


def add_sampling(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=whole(0), default=max_tokens, metavar="N",
                       help="tokens to generate at most (default: %(default)s)")
    group.add_argument("--temperature", type=real(0), default=0.0, metavar="T", help="0 takes the most likely token (default: %(default)s)")
    group.add_argument("--top-k", type=whole(0), default=0, metavar="K",
                       help="keep the K most likely tokens; 0 is off (default: %(default)s)")
    group.add_argument("--top-p", type=real(0, 1, above=True), default=1.0, metavar="P",
                       help="keep the most likely tokens that hold this probability; 1 is off (default: %(default)s)")
    group.add_argument("--min-p", type=real(0, 1), default=0.0, metavar="P",
                       help="drop tokens less likely than this share of the best; 0 is off (default: %(default)s)")
    group.add_argument("--repetition-penalty", type=real(0, above=True), default=1.0, metavar="R",
                       help="weaken tokens seen before; 1 is off (default: %(default)s)")
    group.add_argument("--seed", type=whole(0, (1 << 64) - 1), metavar="S",
                       help="0 to 2^64-1; the same seed draws the same tokens (default: a new one)")
    group.add_argument("--stop", type=checked(_stop), action="append", default=[], metavar="TEXT",
                       help="text that ends the output; may be given several times")


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "max_tokens": args.max_tokens, "temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty, "seed": args.seed, "stop": args.stop,
    }


def open_model(args: argparse.Namespace) -> Model:
    return load(args.model, threads=args.threads, isa=args.isa, ram=args.ram, hot=args.hot, warm=args.warm, cold=args.cold,
                cold_size=args.cold_size, io=args.io, importance=args.importance, prefetch=args.prefetch,
                prefetch_sources=args.prefetch_sources, readable_tiers=args.readable_tiers, kv=args.kv,
                profile=args.profile, calibration=args.calibration, log=spoken_log())


class _Spoken(logging.Handler):
    """Says what the library logs as a line on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"hisparse-rt: {record.getMessage()}")


def spoken_log() -> logging.Logger:
    """A logger for `load`: warnings reach the person at the command line."""
    log = logging.Logger("hisparse-rt", logging.WARNING)
    log.addHandler(_Spoken())
    return log


def say(text: str) -> None:
    """One line for people, on stderr. Where nobody can read it, it is lost, and nothing else is."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def write(text: str) -> None:
    """Output, at once. Characters that the terminal cannot show become question marks."""
    if sys.stdout is not None:
        encoding = sys.stdout.encoding or "utf-8"
        try:
            sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise from_os_error("cannot write the output", error) from error


def lenient_input() -> None:
    """Let bytes that are no text pass through standard input: the tokenizer refuses them with a better message."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")


@contextlib.contextmanager
def output_file(name: str, *, sources: tuple[str, ...] = (), mode: int = 0o666, stdout: bool = False) -> Iterator[BinaryIO]:
    """A file to write, which gets its name only when it is whole; devices and pipes are written as they are.

    sources: files that must not be overwritten. stdout: "-" is standard output, and not refused.
    """
    if stdout and name == "-":
        yield from _standard_output()
        return
    path = check_output(name, sources=sources)
    try:
        if path.exists() and not path.is_file():
            with open(path, "wb") as file:
                yield file
            return
        with NewFile(str(path), mode) as new:
            with open(new.descriptor, "wb", closefd=False) as file:
                yield file
            new.commit()
    except OSError as error:
        if isinstance(error, (HisparseError, BrokenPipeError)):
            raise
        raise from_os_error(f"cannot write {name}", error) from error


def _standard_output() -> Iterator[BinaryIO]:
    if sys.stdout is None:
        raise InvalidError("there is no standard output to write to")
    if sys.stdout.isatty():
        raise InvalidError("these bytes are not for a terminal: send standard output to a file or a program")
    try:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    except OSError as error:
        if isinstance(error, (HisparseError, BrokenPipeError)):
            raise
        raise from_os_error("cannot write the output", error) from error


def check_no_stdout(name: str | None) -> None:
    """What is written to a file only is not written to one that happens to be called "-"."""
    if name == "-":
        raise InvalidError("- is standard output, and this is written to files only; ./- names a file that is called so")


def check_output(name: str, *, sources: tuple[str, ...] = (), stdout: bool = False) -> Path:
    """Where `name` leads to; an error before anything was computed, if that cannot be written. stdout: "-" can be."""
    if stdout and name == "-":
        return Path(name)
    check_no_stdout(name)
    if not name or "\0" in name:
        raise InvalidError(f"{name!r} is not a file name")
    if os.path.exists(name) and not os.path.isfile(name) and not os.path.isdir(name):
        return Path(name)
    path = Path(os.path.realpath(name))  # a link stays a link
    if path.is_dir() or not path.parent.is_dir():
        raise InvalidError(f"cannot write {name}: " + ("it is a folder" if path.is_dir() else f"there is no folder {path.parent}"))
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InvalidError(f"cannot write {name}: no file can be made in {path.parent}")
    if path.exists() and any(os.path.exists(source) and path.samefile(source) for source in sources):
        raise InvalidError(f"cannot write {name}: this command reads it")
    return path


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
