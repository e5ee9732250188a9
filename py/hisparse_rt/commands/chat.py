# SPDX-License-Identifier: Apache-2.0
"""chat: talk with a model."""
from __future__ import annotations

import argparse
import json
import os
import sys

from .. import progress
from ..conversation import Conversation
from ..errors import ContextError, HisparseError
from ..sizes import format_size
from . import common

HELP = "talk with a model"
_HELP = """/save FILE   write the transcript (messages, as JSON)
/stats       speed of the last answer, tokens and memory of the chat
/reset       start again
/exit        leave (so does Ctrl-D)
Ctrl-C       stop the answer"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    common.add_sampling(parser, max_tokens=1024)
    common.add_context(parser, "the trained length")
    common.add_engine(parser)


def run(args: argparse.Namespace) -> int:
    common.lenient_input()
    with common.open_model(args) as model:
        chat = model.conversation(system=args.system, context=args.context, beyond_trained=args.beyond_trained)
        common.say("/help shows the commands")
        while True:
            line = _read_line()
            if line is None:
                return 0
            word, _, rest = line.strip().partition(" ")
            if not word:
                continue
            if word in ("/exit", "/quit"):
                return 0
            try:
                if word.startswith("/"):
                    _command(chat, word, rest.strip())
                else:
                    _answer(chat, line, args)
            except (HisparseError, OSError) as error:
                if isinstance(error, BrokenPipeError):
                    raise
                common.say(f"error: {error}")
                if isinstance(error, ContextError):
                    common.say("(/reset starts again; --context sets how much is held)")


def _read_line() -> str | None:
    """A line of the user; None at the end. Ctrl-C gives an empty line."""
    try:
        if sys.stdin is None:
            return None
        if sys.stdin.isatty():
            import readline  # noqa: F401  gives input() its line editing

            return input("> ")
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    except EOFError:
        common.write("\n")
        return None
    except KeyboardInterrupt:
        common.say("\n(/exit leaves)")
        return ""


def _answer(chat: Conversation, text: str, args: argparse.Namespace) -> None:
    try:
        with progress.bar("reading", "tok") as report:
            stream = chat.stream(text, progress=report, **common.sampling_options(args))
            try:
                for piece in stream:
                    common.write(piece)
            finally:
                stream.close()
    except KeyboardInterrupt:
        common.say("\n(stopped)")
        return
    common.write("\n")


def _command(chat: Conversation, word: str, rest: str) -> None:
    if word == "/help":
        common.say(_HELP)
    elif word == "/reset":
        chat.reset()
        common.say("(forgotten)")
    elif word == "/stats":
        _show_stats(chat)
    elif word == "/save":
        _save(chat, rest)
    else:
        common.say(f"unknown command {word}; /help shows them")


def _show_stats(chat: Conversation) -> None:
    if chat.last is not None and chat.last.finish_reason is not None:
        common.say(common.summary(chat.last.result))
    stats = chat.session.stats()
    common.say(f"context {stats.n_tokens} of {stats.context} tokens, KV {format_size(stats.kv_bytes)} {stats.kv_format} "
               f"in {stats.kv_blocks} blocks of 1 MiB")


def _save(chat: Conversation, name: str) -> None:
    if not name:
        common.say("/save needs a file name")
        return
    path = os.path.expanduser(name)
    transcript = json.dumps({"model": chat.model.path, "messages": chat.messages}, ensure_ascii=False, indent=1)
    with common.output_file(path, mode=0o600, sources=(os.fsdecode(chat.model.file),)) as file:
        file.write(transcript.encode("utf-8", "replace"))
    common.say(f"transcript of {len(chat.messages)} messages written to {path}")
