# SPDX-License-Identifier: Apache-2.0
"""The command line, hisparse-rt. One module of `commands` per command."""
from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from . import __version__
from .commands import common
from .errors import HisparseError
from .tools.errors import ConvertError

_COMMANDS = {"convert": "convert", "calibrate": "calibrate", "generate": "generate", "chat": "chat", "logits": "logits",
             "inspect": "inspect", "plan": "plan", "eval": "evaluate", "bench": "bench"}
"""Their modules."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return its exit code: 0 done, 1 failed (one line on stderr says why), 2 wrong usage, 130 interrupted."""
    try:
        with _clean_end():
            words = sys.argv[1:] if arguments is None else arguments
            args = _parser(words).parse_args(words)
            code: int = args.run(args)
            common.write("")
            return code
    except BrokenPipeError:  # the reader of our output has gone
        return 1
    except KeyboardInterrupt:
        return 130
    except (HisparseError, ConvertError, OSError) as error:
        _say_error(error)
        return 1
    except MemoryError as error:  # of Python's own, or NumPy's
        common.say(f"hisparse-rt: out of memory{': ' if str(error) else ''}{error}")
        return 1
    finally:
        _settle_output()


@contextlib.contextmanager
def _clean_end() -> Iterator[None]:
    """A request to terminate ends the program the way an exception does, so that no temporary file stays."""

    def leave(number: int, frame: Any) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)
              if signal.getsignal(number) is signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _settle_output() -> None:
    """What could not be written was reported, or has nobody to read it; the interpreter must not try again when it ends."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _parser(words: list[str]) -> argparse.ArgumentParser:
    """Knows the one command that is asked for, since others import what takes long; if there is none, all of them."""
    asked = {name: _COMMANDS[name] for name in words[:1] if name in _COMMANDS}
    parser = argparse.ArgumentParser(prog="hisparse-rt", description="Run LLaMA-family models with hisparse_rt.")
    parser.add_argument("--version", action="version", version=f"hisparse-rt {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, place in (asked or _COMMANDS).items():
        module = importlib.import_module(f".commands.{place}", __package__)
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _say_error(error: BaseException) -> None:
    text = str(error)
    if isinstance(error, OSError) and not isinstance(error, HisparseError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    common.say(f"hisparse-rt: {' '.join(text.split()) or type(error).__name__}")


if __name__ == "__main__":
    sys.exit(main())
