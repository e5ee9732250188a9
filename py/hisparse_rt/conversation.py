# SPDX-License-Identifier: Apache-2.0
"""A chat of many turns that computes each word once."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from ._library import refuse_copies
from .chat import as_messages
from .errors import BusyError, StateError
from .request import SamplingOptions, sampling_of
from .session import Session
from .stream import Stream

if TYPE_CHECKING:
    from .chat import Message
    from .model import Model


class Conversation:
    """Messages and the session that has read them.

    Each turn renders the whole chat with the model's template and compares token ids with what the session holds, so a
    template that rewrites earlier turns is followed exactly; only what differs is computed again.

    messages   the chat so far, {"role", "content"}; may be edited between turns
    """

    def __init__(self, model: Model, *, system: str | None = None, **session_options: Any) -> None:
        self.model = model
        self.messages: list[Message] = []
        self._options = session_options
        self._system = system
        self._session: Session | None = None
        self.last: Stream | None
        """The stream of the last answer, with its result."""
        self.reset()
        model.require_chat()
        as_messages("", system)  # what cannot be is told before somebody says something
        model.session(**session_options).close()

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.close()
        self.last = None
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def send(self, text: str, **options: Unpack[SamplingOptions]) -> str:
        """Say something; return the answer, which is added to `messages`."""
        return "".join(self.stream(text, **options))

    def stream(
        self, text: str, *, progress: Callable[[int, int], object] | None = None, **options: Unpack[SamplingOptions]
    ) -> Generator[str, None, None]:
        """Say something; iterate over pieces of the answer. If it is closed early, or dropped, what was said so far is the answer.

        BusyError while an earlier answer is unfinished.
        """
        sampling = sampling_of(options)
        if self._session is not None:
            self._session._check_not_streaming()
        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        self._follow(self.model.chat_ids(messages))
        assert self._session is not None
        running = Stream(self._session, sampling, self.model._detokenizer(), owns_session=False, report=progress)
        self.last = running
        return _Answer(self, running, messages)

    @property
    def session(self) -> Session:
        """The session behind the chat; StateError before the first turn."""
        if self._session is None:
            raise StateError("nothing was said yet")
        return self._session

    def close(self) -> None:
        """Free the session. The messages stay, and the next turn computes them again."""
        if self._session is not None:
            self._session.close()
            self._session = None

    __reduce_ex__ = refuse_copies("conversation", "keep its messages instead")

    def _follow(self, ids: Any) -> None:
        """Make the session hold exactly `ids`."""
        if self._session is None:
            self._session = self.model.session(**self._options)
        if self._session.stats().status < 0:  # an earlier turn failed, such as one whose pages could not be read back
            self._session.rebuild()
        try:
            same = self._session._cut_to_beginning_of(ids)
        except StateError:  # too far back for its key-value format
            self.close()
            self._session, same = self.model.session(**self._options), 0
        if same < len(ids):
            self._session._append(np.ascontiguousarray(ids[same:]))


class _Answer(Generator[str, None, None]):
    """Pieces of an answer. Its end, by whatever way, is that of the request, and adds what was said to the conversation: a generator
    that was never started would do neither."""

    def __init__(self, conversation: Conversation, running: Stream, messages: list[Message]) -> None:
        self._running = running
        self._finalizer = weakref.finalize(self, _settle, conversation, running, messages)
        self._finalizer.atexit = False  # the request ends by itself

    def __next__(self) -> str:
        try:
            return next(self._running)
        except BusyError:  # another thread is reading
            raise
        except BaseException:
            self.close()
            raise

    def send(self, value: None) -> str:
        return next(self)

    def throw(self, kind: Any, value: Any = None, traceback: Any = None) -> str:
        self.close()
        return self._running.throw(kind, value, traceback)

    def close(self) -> None:
        self._finalizer()


def _settle(conversation: Conversation, running: Stream, messages: list[Message]) -> None:
    running.close()
    if running.tokens and conversation.last is running:  # and not forgotten since
        conversation.messages = [*messages, {"role": "assistant", "content": running.text}]
