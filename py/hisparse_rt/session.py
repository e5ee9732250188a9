# SPDX-License-Identifier: Apache-2.0
"""One sequence of tokens with its key-value memory."""
from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np
import numpy.typing as npt

from ._library import Handle, call, ffi, lib, new_struct, refuse_copies, rest_at_exit, watched
from .checks import file_name, integer
from .errors import BusyError, ContextError, InvalidError, WorkCancelledError
from .ids import Ids, as_ids
from .request import SamplingOptions, sampling_of
from .result import Result
from .stream import Stream

if TYPE_CHECKING:
    from .model import Model
    from .profile import ProfileLike

KV_FORMATS = {"auto": lib.HSR_KV_AUTO, "f32": lib.HSR_KV_F32, "bf16": lib.HSR_KV_BF16, "int8": lib.HSR_KV_INT8,
              "compact": lib.HSR_KV_COMPACT, "vtq": lib.HSR_KV_VTQ}
INDEX_KINDS = {"auto": lib.HSR_INDEX_AUTO, "none": lib.HSR_INDEX_NONE, "sketch": lib.HSR_INDEX_SKETCH,
               "minmax": lib.HSR_INDEX_MINMAX, "gaussian": lib.HSR_INDEX_GAUSSIAN, "cluster": lib.HSR_INDEX_CLUSTER}
INDEX_NAMES = {number: name for name, number in INDEX_KINDS.items()}
_INT32_MAX = (1 << 31) - 1
KV_NAMES = {number: name for name, number in KV_FORMATS.items()}


@dataclass(frozen=True, slots=True)
class Captured:
    """What `Session.capture` recorded."""

    queries: npt.NDArray[np.float32]
    """[layers, n, n_heads, head_dim], after rope; NaN where nothing was computed."""
    n_slices: npt.NDArray[np.int32]
    """[layers, n, n_kv_heads]: how many slices of 16 tokens were selected; -1 where nothing was computed, or densely."""
    slices: npt.NDArray[np.int32]
    """[layers, n, n_kv_heads, slices]: which ones, ascending; slice i begins at token 16 i. Behind the last one anything may be."""


@dataclass(frozen=True, slots=True)
class SessionStats:
    """Counters of one session."""

    status: int
    """0, or the status that made it fail; `rebuild` is the way back."""
    n_tokens: int
    """Tokens held, computed and queued."""
    n_computed: int
    context: int
    prefill_tokens: int
    """Prompt tokens computed since creation."""
    decode_tokens: int
    """Tokens sampled since creation."""
    kv_bytes: int
    kv_blocks: int
    """Blocks of 1 MiB."""
    pages_open: int
    pages_full: int
    pages_sealed: int
    kv_format: str
    running: bool
    index_kind: str
    profile: int
    """Id of the profile in use."""
    index_bytes: int
    sparse_rows: int
    """Rows computed with a selection of their own: decoded tokens, mostly."""
    covered: float
    """Estimated share of the attention mass that the last such row attended, mean over layers and heads; NaN: none yet."""
    covered_mean: float
    attended_tokens: float
    """Tokens that the last such row attended, mean over layers and kv heads."""
    estimated_pages: int
    """Pages of one layer and kv head that such rows did not wait for (`Profile.late`), each time."""


class Session:
    """A sequence that grows by `append` and `generate`. Made by `Model.session`.

    All methods raise BusyError while another thread is inside the session or a stream of it is unfinished, except `cancel`
    and `stats`, which any thread may call at any time.
    """

    def __init__(
        self, model: Model, *, context: int | None = None, kv: str | None = None, beyond_trained: bool = False,
        window_size: int | None = None, sink_size: int | None = None, rollback_tokens: int | None = None,
        profile: ProfileLike | None = None, index: str = "auto", sketch: tuple[int, int] | None = None,
    ) -> None:
        opts = self._options(model, context, kv, beyond_trained, window_size, sink_size, rollback_tokens, profile, index, sketch)
        self._opened(model)
        with model._native.engine.lock, self._closed_if_interrupted():
            call(lib.hsr_session_create, model._native.engine.pointer, opts, self._handle.box)
        model._sessions.add(self)

    @staticmethod
    def _options(
        model: Model, context: int | None = None, kv: str | None = None, beyond_trained: bool = False, window_size: int | None = None,
        sink_size: int | None = None, rollback_tokens: int | None = None, profile: ProfileLike | None = None, index: str = "auto",
        sketch: tuple[int, int] | None = None,
    ) -> Any:
        """A native hsr_session_opts."""
        opts = ffi.new("hsr_session_opts *")
        lib.hsr_session_opts_init(opts, ffi.sizeof("hsr_session_opts"))
        if kv is not None and kv not in KV_FORMATS:
            raise InvalidError(f"kv is {kv!r}, known formats are {', '.join(KV_FORMATS)}")
        opts.kv_format = KV_FORMATS[kv or "auto"]
        if context is not None:
            opts.context = integer("context", context, 1, _INT32_MAX)
        for name, value in (("window_size", window_size), ("sink_size", sink_size), ("rollback_tokens", rollback_tokens)):
            if value is not None:
                setattr(opts, name, integer(name, value, 0, _INT32_MAX))
        opts.beyond_trained = bool(beyond_trained)
        if index not in INDEX_KINDS:
            raise InvalidError(f"index is {index!r}, known kinds are {', '.join(INDEX_KINDS)}")
        opts.index_kind = INDEX_KINDS[index]
        if sketch is not None:
            if not isinstance(sketch, (tuple, list)) or len(sketch) != 2:
                raise TypeError(f"sketch must be two numbers, of components in 4 bits and in 2, not {sketch!r}")
            opts.sketch_4bit, opts.sketch_2bit = (integer("sketch", bits, 0, 4096) for bits in sketch)
        if profile is not None:
            opts.profile = model.profile_id(profile)
        return opts

    def _opened(self, model: Model) -> None:
        self.model = model
        self._inside = threading.Lock()
        self._streaming = False
        self._handle = Handle(self, "hsr_session", lib.hsr_session_destroy, keep=model._native)

    # ---- tokens

    def append(self, prompt: str | Ids) -> int:
        """Add a prompt: text, or token ids taken as they are. Returns how many tokens were added.

        Text that opens an empty session gets the tokenizer's begin token; control tokens spelled in it are recognised.
        Nothing is computed yet. ContextError, TokenError, NoSpaceError; ValueError for an empty prompt.
        """
        self._check_not_streaming()
        ids = self.model.encode(prompt, prefix=self.n_tokens == 0) if isinstance(prompt, str) else as_ids(prompt)
        if not ids.size:
            raise InvalidError("an empty prompt: there is nothing to append")
        self._append(ids)
        return int(ids.size)

    @property
    def n_tokens(self) -> int:
        return self.stats().n_tokens

    @property
    def tokens(self) -> list[int]:
        """All token ids, prompt and output."""
        return [int(token) for token in self._tokens()]

    def truncate(self, n: int) -> None:
        """Forget all tokens from position n on. InvalidError if n is above the length, StateError if it is too far back."""
        self._check_not_streaming()
        self._call(lib.hsr_session_truncate, integer("n", n, 0, _INT32_MAX))

    def set_profile(self, profile: ProfileLike) -> None:
        """Use another profile from here on. UnsupportedError if the session's index lacks what its selector reads."""
        self._check_not_streaming()
        self._call(lib.hsr_session_set_profile, self.model.profile_id(profile))

    def rebuild(self) -> None:
        """Drop the key-value memory and compute all tokens again, with the next work: the way back after a failure."""
        self._check_not_streaming()
        self._call(lib.hsr_session_rebuild)

    def fork(self) -> Session:
        """A second session with the same tokens and the same memory of them."""
        self._check_not_streaming()
        fork = Session.__new__(Session)
        fork._opened(self.model)
        with fork._closed_if_interrupted():
            self._call(lib.hsr_session_fork, fork._handle.box)
        self.model._sessions.add(fork)
        return fork

    # ---- computing

    def prefill(self, progress: Callable[[int, int], object] | None = None) -> None:
        """Compute all appended tokens now. `progress(done, total)` is called between steps, on this thread."""
        self._check_not_streaming()
        with watched(progress) as callback:
            self._call(lib.hsr_session_prefill, callback, ffi.NULL)

    def logits(self, ids: Ids, chunk: int | None = None) -> npt.NDArray[np.float32]:
        """Append `ids`, compute them, and return the logits of each: [len(ids), vocab_size]; row i predicts the token after ids[i].

        chunk: tokens per call into the runtime; None takes the engine's. With dense attention it never changes a bit of the result.
        With a sparse profile each chunk is an append of its own, whose boundaries matter: None then takes all ids at once.
        """
        self._check_not_streaming()
        array = as_ids(ids)
        if not array.size:
            raise InvalidError("no ids: logits needs at least one token")
        step = (integer("chunk", chunk, 1, _INT32_MAX) if chunk is not None
                else self.model.chunk if self.stats().profile == 0 else array.size)
        self.check_room(array.size)
        out = np.empty((array.size, self.model.info.vocab_size), dtype=np.float32)
        for start in range(0, array.size, step):  # a return to Python between steps lets Ctrl-C in
            part, rows = array[start:start + step], out[start:start + step]
            self._call(lib.hsr_session_logits, ffi.from_buffer("int32_t[]", part), part.size,
                       ffi.from_buffer("float[]", rows, require_writable=True), rows.size)
        return out

    @overload
    def generate(self, *, stream: Literal[True], progress: Callable[[int, int], object] | None = ...,
                 **options: Unpack[SamplingOptions]) -> Stream: ...
    @overload
    def generate(self, *, return_details: Literal[True], stream: Literal[False] = ...,
                 progress: Callable[[int, int], object] | None = ..., **options: Unpack[SamplingOptions]) -> Result: ...
    @overload
    def generate(self, *, stream: Literal[False] = ..., return_details: Literal[False] = ...,
                 progress: Callable[[int, int], object] | None = ..., **options: Unpack[SamplingOptions]) -> str: ...

    def generate(
        self, *, stream: bool = False, return_details: bool = False, progress: Callable[[int, int], object] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> str | Result | Stream:
        """Continue the sequence. Options are those of `Sampling`.

        Returns the text; a `Result` with return_details=True; with stream=True an iterator of pieces. The sampled tokens are
        part of the session afterwards, up to the one that ended the output or completed a stop string.
        `progress(done, total)` follows the computing of a long prompt.
        """
        self._check_not_streaming()
        running = Stream(self, sampling_of(options), self.model._detokenizer(), owns_session=False, report=progress)
        return finished(running, stream, return_details)

    def cancel(self) -> None:
        """End the session's work at the next step; tokens not yet computed are dropped. From any thread."""
        with self._handle.lock:
            call(lib.hsr_session_cancel, self._handle.pointer)

    # ---- saving

    def save(self, path: str | bytes | os.PathLike[Any], progress: Callable[[int, int], object] | None = None) -> None:
        """Write the session to a file, from which `Model.restore` goes on without computing anything again.

        The file holds the text of the session, as token ids and as keys and values; it is readable for its owner only. It takes its
        name when it is whole and on disk: whatever goes wrong, an older file of that name stays as it is. Tokens that were
        appended and not computed yet are computed first. `progress(done, total)` is called in between, on this thread, with bytes.
        FileError, StateError, InvalidError.
        """
        self.prefill()
        with watched(progress) as callback:
            self._call(lib.hsr_session_save, file_name(path), callback, ffi.NULL)

    @classmethod
    def _restore(cls, model: Model, path: str | bytes | os.PathLike[Any], context: int | None, kv: str | None, beyond_trained: bool,
                 profile: ProfileLike, progress: Callable[[int, int], object] | None, like: Any = ffi.NULL) -> Session:
        opts = ffi.new("hsr_restore_opts *")
        lib.hsr_restore_opts_init(opts, ffi.sizeof("hsr_restore_opts"))
        if kv is not None and kv not in KV_FORMATS:
            raise InvalidError(f"kv is {kv!r}, known formats are {', '.join(KV_FORMATS)}")
        opts.kv_format = KV_FORMATS[kv or "auto"]
        opts.context = 0 if context is None else integer("context", context, 1, _INT32_MAX)
        opts.beyond_trained = bool(beyond_trained)
        opts.profile = model.profile_id(profile)
        opts.like = like
        session = cls.__new__(cls)
        session._opened(model)
        name, native = file_name(path), model._native
        with native.engine.lock:
            engine = native.engine.pointer
            native.inside[0] += 1
        try:
            with watched(progress) as callback, session._closed_if_interrupted():
                opts.progress = callback
                call(lib.hsr_session_restore, engine, name, opts, session._handle.box)
        finally:
            with native.engine.lock:
                native.inside[0] -= 1
        model._sessions.add(session)
        return session

    # ---- facts and end

    # ---- unstable: for calibration and measuring

    def keys(self, layer: int, first: int = 0, n: int | None = None) -> npt.NDArray[np.float32]:
        """Keys of a layer, after rope, as attention reads them: float32 [n, n_kv_heads, head_dim]."""
        return self._observe(lib.HSR_OBSERVE_KEYS, layer, first, n)

    def values(self, layer: int, first: int = 0, n: int | None = None) -> npt.NDArray[np.float32]:
        """Values of a layer: float32 [n, n_kv_heads, head_dim]."""
        return self._observe(lib.HSR_OBSERVE_VALUES, layer, first, n)

    def masses(self, layer: int) -> npt.NDArray[np.float32]:
        """Attention that each page of 64 tokens got so far, for profiles with forced_history or selector history: float32 [pages,
        n_kv_heads], zeros without."""
        info = self.model.info
        out = np.empty((-(-self.stats().n_computed // 64), info.n_kv_heads), np.float32)
        self._call(lib.hsr_session_observe, lib.HSR_OBSERVE_MASSES, integer("layer", layer, 0, _INT32_MAX), 0, len(out),
                   ffi.cast("float *", ffi.from_buffer(out)), out.size)
        return out

    def fill(self, n: int, seed: int = 0, progress: Callable[[int, int], object] | None = None) -> None:
        """Append n positions whose keys and values are sampled from those computed so far: for measuring long contexts. What the
        model says afterwards means nothing. `progress(done, n)` is called now and then."""
        count, done, seed = integer("n", n, 1, _INT32_MAX), 0, integer("seed", seed, 0, (1 << 64) - 1)
        while done < count:
            part = min(count - done, 32768)  # each part begins with reading what it samples from
            self._call(lib.hsr_session_fill, part, (seed + done) % (1 << 64))
            done += part
            if progress is not None:
                progress(done, count)

    @contextlib.contextmanager
    def capture(self, n: int, *, first: int = 0, stride: int = 1, layers: range | None = None, slices: int = 0) -> Iterator[Captured]:
        """Inside the block, queries of positions first + k * stride, k < n, are recorded as they are computed; and what was selected for
        them, at most `slices` slices for each key-value head."""
        info = self.model.info
        layers = range(info.n_layers) if layers is None else layers
        if not isinstance(layers, range) or layers.step != 1:
            raise TypeError(f"layers must be a range of step 1, not {layers!r}")
        n, first, slices = (integer(name, value, 0, _INT32_MAX) for name, value in (("n", n), ("first", first), ("slices", slices)))
        shape, kv_shape = (len(layers), n), (len(layers), n, info.n_kv_heads)
        captured = Captured(np.full((*shape, info.n_heads, info.head_dim), np.nan, np.float32), np.full(kv_shape, -1, np.int32),
                            np.full((*kv_shape, slices), -1, np.int32))
        native = new_struct("hsr_capture")
        native.layer_first, native.layer_end, native.first, native.n = layers.start, layers.stop, first, n
        native.stride, native.max_slices = integer("stride", stride, 1, _INT32_MAX), slices
        native.queries = ffi.cast("float *", ffi.from_buffer(captured.queries))
        native.n_slices = ffi.cast("int32_t *", ffi.from_buffer(captured.n_slices))
        native.slices = ffi.cast("int32_t *", ffi.from_buffer(captured.slices)) if slices else ffi.NULL
        self._call(lib.hsr_session_capture, native)
        try:
            yield captured
        finally:
            if not self.closed:
                self._call(lib.hsr_session_capture, new_struct("hsr_capture"))

    def _observe(self, what: int, layer: int, first: int, n: int | None) -> npt.NDArray[np.float32]:
        info, computed = self.model.info, self.stats().n_computed
        first = integer("first", first, 0, computed)
        count = integer("n", computed - first if n is None else n, 0, computed - first)
        out = np.empty((count, info.n_kv_heads, info.head_dim), np.float32)
        self._call(lib.hsr_session_observe, what, integer("layer", layer, 0, _INT32_MAX), first, count,
                   ffi.cast("float *", ffi.from_buffer(out)), out.size)
        return out

    def stats(self) -> SessionStats:
        """Counters of this session."""
        native = new_struct("hsr_session_stats")
        with self._handle.lock:
            call(lib.hsr_session_get_stats, self._handle.pointer, native)
        values = {field.name: getattr(native, field.name) for field in fields(SessionStats)}
        return SessionStats(**{**values, "kv_format": KV_NAMES.get(native.kv_format, "?"), "running": bool(native.running),
                               "index_kind": INDEX_NAMES.get(native.index_kind, "?")})

    def close(self) -> None:
        """Free the session and its memory now; a second call does nothing. BusyError while another thread is inside."""
        with self._exclusive():
            self._handle.close()

    @property
    def closed(self) -> bool:
        return self._handle.closed

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    __reduce_ex__ = refuse_copies("session", "use fork() for a second one")

    # ---- inside

    @contextlib.contextmanager
    def _closed_if_interrupted(self) -> Iterator[None]:
        """Around the call that makes the native session: Ctrl-C arrives behind it, and its traceback would keep the session alive."""
        try:
            yield
        except BaseException:
            self._handle.close()
            raise

    def _exclusive(self) -> threading.Lock:
        # Asking first and locking then is not atomic, but the lock statement is safe against Ctrl-C; who loses the race waits.
        if self._inside.locked():
            raise BusyError("another thread is using this session")
        return self._inside

    def _call(self, function: Callable[..., int], *arguments: Any, err: Any = None) -> int:
        try:
            with self._exclusive():
                return call(function, self._handle.pointer, *arguments, err=err)
        except WorkCancelledError:
            rest_at_exit()
            raise

    def _check_not_streaming(self) -> None:
        if self._streaming:
            raise BusyError("a stream of this session is unfinished: read it to the end or close it")

    def check_room(self, n: int) -> None:
        """ContextError if n more tokens would not fit the context; for work that is done in several pieces."""
        stats = self.stats()
        if stats.n_tokens + n > stats.context:
            raise ContextError(f"{n} tokens after {stats.n_tokens} do not fit a context of {stats.context}")

    def _append(self, ids: npt.NDArray[np.int32]) -> None:
        self._call(lib.hsr_session_append, ffi.from_buffer("int32_t[]", ids), ids.size)

    def _tokens(self, first: int = 0) -> npt.NDArray[np.int32]:
        n = ffi.new("uint64_t *", max(self.n_tokens - first, 0))
        ids = np.empty(int(n[0]), dtype=np.int32)
        self._call(lib.hsr_session_tokens, first, ffi.from_buffer("int32_t[]", ids, require_writable=True), n)
        return ids[:int(n[0])]

    def _cut_to_beginning_of(self, ids: npt.NDArray[np.int32]) -> int:
        """Forget the tokens that do not begin `ids`; return how many are left. StateError if they are too far back."""
        held = self._tokens()
        n = min(len(held), len(ids))
        differing = np.flatnonzero(held[:n] != ids[:n])
        same = int(differing[0]) if differing.size else n
        if same < len(held):
            self.truncate(same)
        return same

    # What a Stream does with its session.

    def _begin(self, request: Any) -> None:
        self._call(lib.hsr_session_generate, request)
        self._streaming = True

    def _next(self, event: Any, err: Any = None) -> int:
        return self._call(lib.hsr_session_next, event, err=err)

    def _compute_prompt(self, report: Callable[[int, int], object] | None) -> None:
        """Compute a long prompt in a way that Ctrl-C can end and `report` can follow; hsr_session_next would only return with
        the first token."""
        stats = self.stats()
        if stats.n_tokens - stats.n_computed <= self.model.chunk:
            return
        with watched(report) as callback:
            self._call(lib.hsr_session_prefill, callback, ffi.NULL)

    def _cancel_request(self) -> None:
        """End a running request and throw its events away."""
        self.cancel()
        event = new_struct("hsr_event")
        while self._next(event) != lib.HSR_AGAIN and event.kind == lib.HSR_EVENT_TOKEN:
            pass

    def _stop_request(self, keep: int) -> None:
        """End a running request; tokens sampled ahead of what was delivered are forgotten."""
        self._cancel_request()
        if self.n_tokens > keep:
            self._call(lib.hsr_session_truncate, keep)

    def _end_stream(self, keep: int, close: bool) -> None:
        """The stream is over, by whatever way: free the session, or leave it with `keep` tokens at most."""
        self._streaming = False
        if self.closed:
            return
        if self._inside.locked():  # another thread still reads the stream
            self.cancel()
            with self._inside:
                pass
        if close:
            self.close()
        elif self.stats().running:
            self._stop_request(keep)


@overload
def finished(running: Stream, stream: Literal[False], return_details: Literal[False]) -> str: ...
@overload
def finished(running: Stream, stream: bool, return_details: bool) -> str | Result | Stream: ...


def finished(running: Stream, stream: bool, return_details: bool) -> str | Result | Stream:
    """What a generate call returns."""
    if stream:
        return running
    text = running.read()
    return running.result if return_details else text
