# SPDX-License-Identifier: Apache-2.0
"""Streams for asyncio: the event loop never waits for the library."""
from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from ._library import refuse_copies
from .errors import HisparseError, StateError
from .result import Result
from .stream import Stream

if TYPE_CHECKING:
    from .model import Model


class AsyncStream(AsyncIterator[str]):
    """Iterate with `async for`. Everything is computed on a worker thread of the model.

    Cancelling the task that waits ends the native work within one step and frees its memory before the cancellation goes on.
    Leaving the loop early: use `async with`, or `aclose`, to free the memory at once; otherwise it is freed with the object.
    """

    def __init__(self, model: Model, make: Callable[[], Stream]) -> None:
        self._model = model
        self._make = make
        self._stream: Stream | None = None
        self._working = False
        self._cancelled = False

    async def __anext__(self) -> str:
        piece = await self._run(self._advance)
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def read(self) -> str:
        """Run to the end; return the whole text."""
        async for _ in self:
            pass
        return self.result.text

    @property
    def result(self) -> Result:
        """Everything about the finished request; StateError before its end."""
        if self._stream is None:
            raise StateError("the request has not started")
        return self._stream.result

    @property
    def tokens(self) -> list[int]:
        """Every id sampled so far."""
        return [] if self._stream is None else self._stream.tokens

    async def aclose(self) -> None:
        """End the work and free what it held; a second call does nothing."""
        self._cancelled = True
        if self._stream is not None and not self._model.closed:
            await self._run(self._stream.close)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    __reduce_ex__ = refuse_copies("stream", "keep its text instead")

    def _advance(self) -> str | None:
        if self._stream is None:
            if self._cancelled:
                return None
            self._stream = self._make()
        return next(self._stream, None)

    def _abort(self) -> None:
        """From the loop's thread, while the worker computes."""
        self._cancelled = True
        stream = self._stream
        if stream is not None:
            with contextlib.suppress(HisparseError):  # it ended by itself in this moment
                stream.cancel()

    def _settle(self) -> None:
        if self._stream is not None:
            self._stream.close()

    async def _run(self, function: Callable[[], str | None]) -> str | None:
        import asyncio  # late: a large package, and most programs have no loop

        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._model._worker(), function)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            self._abort()
            work.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody else will look at it
            await asyncio.wait([work])
            self._settle()
            raise
