# SPDX-License-Identifier: Apache-2.0
"""From token ids to text that can be shown at once.

A character may be spread over several tokens, and a stop string over many. What is not certain yet is held back, and
nothing that was handed out is ever taken back. Pure Python: it knows a `decode` function and ids, no model.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

_UNFINISHED = "\ufffd"  # what decoders make of bytes that are no character (yet)


class Detokenizer:
    """Text of a growing list of ids. All pieces joined are exactly decode(all ids).

    decode    the tokenizer's own, special tokens left out
    silent    ids that decode to nothing
    byte_ids  ids that stand for one byte each, of tokenizers with byte fallback. Such a decoder judges a whole run of them at
              once, so a run is held until it ends
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], silent: Collection[int] = (), byte_ids: Collection[int] = ()
    ) -> None:
        self._decode = decode
        self._silent = silent
        self._byte_ids = byte_ids
        # Decoding everything again for each token would take quadratic time. Text depends on the neighbours to the left
        # only near the border, so the ids of the last piece are decoded with the pending ones and their text is cut off.
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Take one id; return what is certain now, often "" for part of a character."""
        if token in self._silent:
            return ""
        self._pending.append(token)
        if token in self._byte_ids:
            return ""
        text = self._decode(self._context + self._pending)
        if text.endswith(_UNFINISHED) or not text.startswith(self._context_text):
            return ""
        piece = text[len(self._context_text):]
        self._advance()
        return piece

    def finish(self) -> str:
        """The rest; bytes that never became a character are U+FFFD."""
        text = self._decode(self._context + self._pending).removeprefix(self._context_text)
        self._context, self._context_text, self._pending = [], "", []
        return text

    def _advance(self) -> None:
        # Some decoders drop a space at the very start. A context that decodes to nothing would move that start.
        text = self._decode(self._pending)
        if text:
            self._context = self._pending
        else:
            self._context = self._context + self._pending
            text = self._decode(self._context)
        self._context_text = text
        self._pending = []


class StopScanner:
    """Cuts a stream of text just before the earliest stop string, wherever the pieces are cut.

    Earliest means the smallest position in the whole text. Text that may turn out to be the start of a stop string is held.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, piece: str) -> str:
        """Take a piece; return the text that is certainly not part of a stop string. Once `matched` is set it is over."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return piece
        self._held += piece
        position, stop = self._find()
        maybe = self._first_partial()
        if stop is not None and position <= maybe:
            return self._end(position, stop)
        return self._release(maybe)

    def finish(self) -> str:
        """No more text will come: release what was held, up to a stop string that is in it."""
        if self.matched is not None:
            return ""
        position, stop = self._find()
        return self._end(position, stop) if stop is not None else self._release(len(self._held))

    def _find(self) -> tuple[int, str | None]:
        found = [(self._held.index(stop), stop) for stop in self._stops if stop in self._held]
        return min(found, default=(len(self._held), None))

    def _first_partial(self) -> int:
        """Where the first unfinished stop string begins, or the length of the held text."""
        first = size = len(self._held)
        for stop in self._stops:
            for position in range(max(0, size - len(stop) + 1), first):
                if stop.startswith(self._held[position:]):
                    first = position
                    break
        return first

    def _release(self, n: int) -> str:
        text, self._held = self._held[:n], self._held[n:]
        return text

    def _end(self, position: int, stop: str) -> str:
        text, self._held, self.matched = self._held[:position], "", stop
        return text
