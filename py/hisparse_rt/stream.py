# SPDX-License-Identifier: Apache-2.0
"""A running request, read as pieces of text."""
from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from ._library import error_text, lib, new_struct, refuse_copies, rest_at_exit
from .errors import BusyError, StateError, from_status
from .request import Sampling
from .result import Result, TokenLogprob
from .text import Detokenizer, StopScanner

if TYPE_CHECKING:
    from .session import Session


class Stream(Generator[str, None, None]):
    """Iterate for pieces of text as they become certain. All pieces joined are the text of the result.

    The request was checked and its memory reserved when the stream was made; computing happens in next(). Closing the
    stream, or dropping it, ends the work at once. `tokens` grows with every sampled id. One thread at a time.
    """

    def __init__(
        self, session: Session, sampling: Sampling, detokenizer: Detokenizer | None, *, owns_session: bool,
        report: Callable[[int, int], object] | None = None,
    ) -> None:
        self._session = session
        self._detokenizer = detokenizer
        self._scanner = StopScanner(sampling.stop)
        self._ends = frozenset(sampling.stop_tokens) | (frozenset() if sampling.ignore_eos else frozenset(session.model.info.eos_tokens))
        self._owns_session = owns_session
        self._report = report
        self._wants_logprobs = sampling.logprobs is not None
        self._event = new_struct("hsr_event")
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._reading = threading.Lock()
        self._started = self._first = self._last = 0.0
        self.tokens: list[int] = []
        self.seed = sampling.draw_seed()
        self.finish_reason: str | None = None
        """"stop" or "length" once the request is over; None before, and when it was closed early or failed."""
        before = session.stats()
        self.prompt_tokens = before.n_tokens
        self._prefill_tokens = before.n_tokens - before.n_computed
        self._kv_bytes = 0
        request, alive = sampling.native(self.seed)  # alive: arrays the request points to, copied by the call
        session._begin(request)
        self._end = _End(session, self.prompt_tokens, owns_session)
        self._finalizer = weakref.finalize(self, self._end)

    # ---- reading

    def __next__(self) -> str:
        while self._finalizer.alive:
            piece = self.step()
            if piece:
                return piece
        raise StopIteration

    def step(self) -> str:
        """Compute until the next event of this request; return the text it made certain, often ""."""
        if not self._finalizer.alive:
            return ""
        try:
            with self._one_reader():
                return self._keep(self._take_event())
        except BusyError:  # another thread is reading; this stream is its
            raise
        except BaseException:
            self.close()
            rest_at_exit()
            raise

    def read(self) -> str:
        """Run to the end; return the whole text."""
        for _ in self:
            pass
        return self.text

    @property
    def text(self) -> str:
        """All pieces so far."""
        return "".join(self._pieces)

    @property
    def result(self) -> Result:
        """Everything about the finished request; StateError before its end."""
        if self.finish_reason is None:
            raise StateError("the request has not finished")
        return Result(
            text=self.text, tokens=tuple(self.tokens), finish_reason=self.finish_reason, stop=self._scanner.matched,
            logprobs=tuple(self._logprobs) if self._wants_logprobs else None, seed=self.seed,
            prompt_tokens=self.prompt_tokens, prefill_tokens=self._prefill_tokens,
            prefill_seconds=(self._first or self._last) - self._started, decode_seconds=self._last - self._first if self._first else 0.0,
            kv_bytes=self._kv_bytes,
        )

    # ---- ending

    def close(self) -> None:
        """End the work and free what it held; a second call does nothing."""
        self._finalizer()

    def cancel(self) -> None:
        """From any thread: end the work at the next step. The thread that reads gets WorkCancelledError."""
        self._session.cancel()

    def send(self, value: None) -> str:
        return next(self)

    def throw(self, kind: Any, value: Any = None, traceback: Any = None) -> str:
        """As for every generator: end, and raise the exception here."""
        self.close()
        error = kind if isinstance(kind, BaseException) else kind() if value is None else value
        raise error

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    __reduce_ex__ = refuse_copies("stream", "keep its text instead")

    # ---- inside

    def _one_reader(self) -> threading.Lock:
        # Who comes between the question and the lock waits, and finds the event of the other taken.
        if self._reading.locked():
            raise BusyError("another thread is reading this stream")
        return self._reading

    def _keep(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece

    def _take_event(self) -> str:
        if not self._started:
            self._started = time.monotonic()
            self._session._compute_prompt(self._report)
        event = self._event
        err = new_struct("hsr_error")
        if not self._finalizer.alive:  # another thread read the last event in this moment
            return ""
        if self._session._next(event, err) == lib.HSR_AGAIN:
            raise StateError("the request of this stream was ended by someone else")
        if event.kind == lib.HSR_EVENT_TOKEN:
            return self._take_token(event)
        if event.kind == lib.HSR_EVENT_FAILED:
            raise from_status(event.status, error_text(err))
        return self._finish("stop" if event.reason == lib.HSR_FINISH_STOP else "length")

    def _take_token(self, event: Any) -> str:
        self._last = time.monotonic()
        self._first = self._first or self._last
        token = event.token
        self.tokens.append(token)
        self._end.keep = event.position + 1
        if self._wants_logprobs:
            top = tuple((event.logprobs[i].token, event.logprobs[i].logprob) for i in range(event.n_logprobs))
            self._logprobs.append(TokenLogprob(token, event.logprob, top))
        if token in self._ends or self._detokenizer is None:
            return ""
        piece = self._scanner.push(self._detokenizer.push(token))
        if self._scanner.matched is not None:
            self._finish("stop")
        return piece

    def _finish(self, reason: str) -> str:
        self._last = self._last or time.monotonic()
        rest = ""
        if self._detokenizer is not None and self._scanner.matched is None:
            rest = self._scanner.push(self._detokenizer.finish()) + self._scanner.finish()
            if self._scanner.matched is not None:
                reason = "stop"
        self.finish_reason = reason
        self._kv_bytes = self._session.stats().kv_bytes
        self._finalizer()
        return rest


class _End:
    """What ends a stream, at the latest when it is collected. Knows the session, not the stream."""

    def __init__(self, session: Session, keep: int, owns_session: bool) -> None:
        self.session = session
        self.keep = keep  # tokens delivered so far, prompt included
        self.owns_session = owns_session

    def __call__(self) -> None:
        self.session._end_stream(self.keep, close=self.owns_session)
