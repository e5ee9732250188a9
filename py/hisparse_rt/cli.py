# SPDX-License-Identifier: Apache-2.0
"""The command line, hisparse-rt. One module of `commands` per command."""
from __future__ import annotations

import argparse
import os
import sys

from . import __version__
from .commands import bench, chat, convert, generate, inspect, logits
from .errors import HisparseError

_COMMANDS = {"convert": convert, "generate": generate, "chat": chat, "logits": logits, "inspect": inspect, "bench": bench}


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return its exit code: 0 done, 1 failed (one line on stderr says why), 2 wrong usage, 130 interrupted."""
    args = _parser().parse_args(arguments)
    try:
        code: int = args.run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output has gone; a later flush must not meet the closed pipe again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except (HisparseError, OSError) as error:
        _say_error(error)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hisparse-rt", description="Run LLaMA-family models with hisparse_rt.")
    parser.add_argument("--version", action="version", version=f"hisparse-rt {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, module in _COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _say_error(error: BaseException) -> None:
    text = " ".join(str(error).split()) or type(error).__name__
    print(f"hisparse-rt: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
