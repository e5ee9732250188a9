# SPDX-License-Identifier: Apache-2.0
"""A loaded model: weights, an engine with its threads and key-value memory, and the tokenizer."""
from __future__ import annotations

import concurrent.futures
import functools
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np
import numpy.typing as npt

from ._library import Handle, call, ffi, lib, new_struct, refuse_copies
from .checks import integer, milliseconds
from .errors import BusyError, FormatError, InvalidError, StateError, TemplateError, TokenizerError
from .ids import Ids, as_ids
from .request import RequestOptions, SamplingOptions
from .session import KV_FORMATS, Session
from .sizes import parse_size
from .text import Detokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from .aio import AsyncStream
    from .chat import Message
    from .conversation import Conversation
    from .profile import Profile, ProfileLike
    from .result import Result
    from .stream import Stream
    from .template import ChatTemplate
    from .tokenizer import TextCodec

ISA_LEVELS = {"auto": lib.HSR_ISA_AUTO, "reference": lib.HSR_ISA_REFERENCE, "avx2": lib.HSR_ISA_AVX2, "avx512": lib.HSR_ISA_AVX512,
              "amx": lib.HSR_ISA_AMX}
PREFETCH_SOURCES = {"groups": lib.HSR_PREFETCH_GROUPS, "rising": lib.HSR_PREFETCH_RISING, "query": lib.HSR_PREFETCH_QUERY}
READABLE = {"all": lib.HSR_READ_ALL, "hot": lib.HSR_READ_HOT}
IO_ENGINES = {"auto": lib.HSR_IO_AUTO, "uring": lib.HSR_IO_URING, "pread": lib.HSR_IO_PREAD}
IMPORTANCES = {"balanced": lib.HSR_IMPORTANCE_BALANCED, "summarize": lib.HSR_IMPORTANCE_SUMMARIZE, "chat": lib.HSR_IMPORTANCE_CHAT}
DTYPES = {lib.HSR_DTYPE_F32: "f32", lib.HSR_DTYPE_BF16: "bf16", lib.HSR_DTYPE_Q8: "q8", lib.HSR_DTYPE_Q4: "q4"}
_LOG_LEVELS = ((logging.ERROR, lib.HSR_LOG_ERROR), (logging.WARNING, lib.HSR_LOG_WARN), (logging.INFO, lib.HSR_LOG_INFO))
_CLOSE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Hyper-parameters and sizes of a model."""

    arch: str
    dtype: str
    """Of the projections: f32, bf16, q8 or q4."""
    vocab_size: int
    """Length of a row of logits."""
    tokenizer_size: int
    """Ids from here to vocab_size are padding and never sampled."""
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    context_length: int
    """Tokens the model was trained for."""
    bos_token: int | None
    eos_tokens: tuple[int, ...]
    weight_bytes: int
    n_params: int


@dataclass(frozen=True, slots=True)
class PrefetchStats:
    """What became of pages that were read ahead for one reason."""

    pages: int
    hits: int
    """Of these, attended."""
    wasted: int
    """And gone from memory again without that."""
    bytes: int
    wasted_bytes: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of a model's engine. Blocks are 1 MiB."""

    n_threads: int
    isa: str
    n_sessions: int
    n_queued: int
    last_batch_rows: int
    n_steps: int
    prefill_tokens: int
    decode_tokens: int
    prefill_ns: int
    decode_ns: int
    hot_blocks_total: int
    hot_blocks_used: int
    hot_blocks_reserved: int
    hot_blocks_peak: int
    hot_largest_free_run: int
    hot_bytes_committed: int
    hot_slots_used: int
    hot_slots_wasted: int
    slot_bytes: int
    pages_open: int
    pages_full: int
    pages_sealed: int
    io_engine: str
    """How cold pages are read and written, "io_uring" or "pread"; empty without a cold tier."""
    cold_pages: int
    """Pages that are in the cold file only."""
    cold_bytes_used: int
    cold_bytes_total: int
    cold_hits: int
    """Pages that attention found in memory, with a cold tier in use."""
    cold_misses: int
    """Pages that it had to read."""
    cold_late: int
    """Pages that were already on their way when they were needed."""
    cold_waits: int
    cold_wait_ns: int
    cold_wait_ns_p99: int
    cold_prefetched: int
    cold_prefetch_hits: int
    cold_prefetch_wasted: int
    cold_read_bytes: int
    cold_written_bytes: int
    cold_evictions: int
    cold_max_moves: int
    cold_errors: int
    mover_cpu_ns: int
    cold_estimated: int
    """Pages that were not waited for (`Profile.late`), each time."""
    warm_pages: int
    """Pages in warm memory that attention does not read in place (`readable_tiers="hot"`)."""
    warm_moved_in: int
    """Pages that moved from hot to warm memory."""
    warm_moved_out: int
    """Pages that moved back."""
    warm_dropped: int
    """Pages that left warm memory for others."""
    prefetch: dict[str, PrefetchStats]
    """The cold_prefetch counters by source: those of `load(prefetch_sources=...)`, and "late", what was not waited for."""
    attend_ns: int
    """Of the time of steps (and of `Session.fill`): attention over pages that were chosen, or all."""
    select_ns: int
    """Choosing them, and turning queries into the calibrated basis, which attention over compact and vtq pages needs, too."""
    seal_ns: int
    """Encoding full pages and their index entries."""
    cluster_ns: int
    """Cluster records of the index."""
    cold_largest_free_run: int
    """Of the cold file, in MiB."""
    cold_slots_wasted: int
    """Page slots that are free inside its extents in use."""
    warm_largest_free_run: int
    warm_slots_wasted: int
    cold_read_latency: tuple[int, ...]
    """Reads by time, queueing included: the first of less than a microsecond, number i of 2**(i - 1) to 2**i microseconds."""
    cold_pages_moved: int
    """Pages that have left memory at least once: `cold_evictions` in all."""
    encoded_pages: int
    """Pages of one layer and kv head that were encoded, with finite keys and values."""
    encode_error_mean: float
    """|x - decoded| / |x| over the keys and values of a page: the mean of all pages encoded so far, and the largest."""
    encode_error_max: float


class _Native:
    """The native model and engine. In no reference cycle, so that it outlives every session and dies with the last."""

    def __init__(self, path: bytes) -> None:
        self.model = Handle(self, "hsr_model", _close_model)
        call(lib.hsr_model_open, path, self.model.box)
        self.inside = [0]
        """Calls that use the engine for long without its lock; under that lock."""
        self.engine = Handle(self, "hsr_engine", functools.partial(_destroy_engine, self.inside))
        self.log: Any = None


def _destroy_engine(inside: list[int], box: Any, err: Any) -> int:
    return int(lib.HSR_E_BUSY if inside[0] else lib.hsr_engine_destroy(box, err))


def _close_model(box: Any, err: Any) -> int:
    lib.hsr_model_close(box)
    return 0


class Model:
    """A model that is ready to compute. Made by `load`.

    Threads: any thread may use a model; sessions of different threads are computed together. Close it with `close`, a with
    statement, or by dropping it.
    """

    def __init__(
        self, path: str | bytes | os.PathLike[Any], *, ram: int | str | None = None, hot: int | str | None = None,
        warm: int | str | None = None, cold: str | bytes | os.PathLike[Any] | None = None, cold_size: int | str | None = None,
        io: str = "auto", io_deadline: float = 30.0, importance: str | Mapping[str, Any] = "balanced", prefetch: int = 4,
        prefetch_sources: Iterable[str] | None = None, threads: int = 0, isa: str = "auto", kv: str = "auto", chunk: int = 512,
        max_sessions: int = 256, max_batch: int = 1024,
        log: logging.Logger | None = None, debug_async: bool = False, readable_tiers: str = "all", profile: ProfileLike = 0,
        calibration: str | bytes | os.PathLike[Any] | None = None,
    ) -> None:
        opts = engine_options(ram=ram, hot=hot, warm=warm, cold=cold, cold_size=cold_size, io=io, io_deadline=io_deadline,
                              importance=importance, prefetch=prefetch, prefetch_sources=prefetch_sources, threads=threads, isa=isa,
                              kv=kv, chunk=chunk, max_sessions=max_sessions,
                              max_batch=max_batch, log=log, debug_async=debug_async, readable_tiers=readable_tiers)
        name = os.fsencode(path)
        if not name or b"\0" in name:
            raise InvalidError("the path has a NUL character in it" if name else "the path is empty")
        self.file = name
        """The path as the system spells it."""
        self.path = name.decode("utf-8", "replace")
        """The path as text, for people."""
        self.kv = kv
        self.profile = profile
        self.chunk = int(opts.chunk_tokens)
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        self._native = _Native(name)
        if log is not None:
            self._native.log = ffi.new_handle(log)
            opts.log, opts.log_user = lib.py_log, self._native.log
            opts.log_level = next((number for level, number in _LOG_LEVELS if log.getEffectiveLevel() >= level), lib.HSR_LOG_DEBUG)
        self.calibrated = calibration is not None
        self._calibration = calibration
        if calibration is not None:
            call(lib.hsr_model_load_calibration, self._native.model.pointer, os.fsencode(calibration))
        self._profiles: dict[Any, int] = {}
        call(lib.hsr_engine_create, self._native.model.pointer, opts, self._native.engine.box)
        self.info = self._read_info()
        self.profile_id(profile)   # a wrong one is told now

    # ---- facts

    def metadata(self, key: str) -> str | None:
        """A string of the model file's metadata, or None."""
        value, size = ffi.new("const char **"), ffi.new("uint64_t *")
        name = key.encode("utf-8", "replace")
        with self._native.model.lock:
            if b"\0" in name or lib.hsr_model_metadata(self._native.model.pointer, name, value, size) != lib.HSR_OK:
                return None
            text: bytes = ffi.buffer(value[0], size[0])[:]
            return text.decode("utf-8", "replace")

    @functools.cached_property
    def generation_defaults(self) -> dict[str, Any]:
        """The sampling options the checkpoint recommends, such as {"temperature": 0.6}. Never applied by themselves."""
        return self._json_object("hisparse.generation")

    def stats(self) -> EngineStats:
        """Counters of the engine."""
        native = new_struct("hsr_engine_stats")
        with self._native.engine.lock:
            call(lib.hsr_engine_get_stats, self._native.engine.pointer, native)
        values = {field.name: getattr(native, field.name) for field in fields(EngineStats)}
        isa = next((name for name, level in ISA_LEVELS.items() if level == native.isa), "?")
        prefetch = {source: PrefetchStats(*(getattr(one, field.name) for field in fields(PrefetchStats)))
                    for source, one in zip((*PREFETCH_SOURCES, "late"), native.prefetch, strict=True)}
        return EngineStats(**{**values, "isa": isa, "io_engine": ffi.string(native.io_engine).decode(), "prefetch": prefetch,
                              "cold_read_latency": tuple(native.cold_read_latency)})

    # ---- text

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizers.Tokenizer of the model; TokenizerError if the file has none."""
        return self._codec.tokenizer

    def encode(self, text: str, *, prefix: bool = True, special: bool = True) -> npt.NDArray[np.int32]:
        """Token ids of `text`.

        prefix   put the tokenizer's begin token in front, if it has one, exactly once
        special  True: control tokens spelled in the text become control tokens; False: they stay text, as in chat
        """
        return self._codec.encode(text, prefix=prefix, special=special)

    def decode(self, ids: Ids, *, skip_special: bool = True) -> str:
        """Text of `ids`, without control tokens unless skip_special is False."""
        return self._codec.decode(ids, skip_special=skip_special)

    def chat_ids(
        self, messages: str | Sequence[Message], *, system: str | None = None, history: Sequence[Message] | None = None,
        tools: Sequence[Any] | None = None, add_generation_prompt: bool = True, variables: Mapping[str, Any] | None = None,
    ) -> npt.NDArray[np.int32]:
        """Token ids of a chat in the model's own template. Control tokens spelled inside messages stay ordinary text.

        variables: further names for the template, such as {"enable_thinking": False}.
        TemplateError if the model has no template or the template refuses the messages.
        """
        from .chat import as_messages, chat_ids

        return chat_ids(
            self._codec, self._template, as_messages(messages, system, history), tools=tools,
            add_generation_prompt=add_generation_prompt, variables=variables,
        )

    def chat_text(self, messages: str | Sequence[Message], *, system: str | None = None, history: Sequence[Message] | None = None,
                  tools: Sequence[Any] | None = None, add_generation_prompt: bool = True,
                  variables: Mapping[str, Any] | None = None) -> str:
        """What the template makes of a chat, for people to read. The model gets `chat_ids`."""
        from .chat import as_messages

        return self._template.render(
            as_messages(messages, system, history), tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
        )

    # ---- computing

    def logits(self, ids: Ids, chunk: int | None = None, *, kv: str | None = None, context: int | None = None,
               beyond_trained: bool = False) -> npt.NDArray[np.float32]:
        """Logits of every position: float32 [len(ids), vocab_size]; row i predicts the token after ids[i].

        chunk: tokens per step; None takes the engine's. It changes memory and speed, never a bit of the result.
        context: session length in tokens; None takes what is needed.
        ContextError above the trained length unless beyond_trained; TokenError; ValueError for no ids.
        """
        array = as_ids(ids)
        if not array.size:
            raise InvalidError("no ids: logits needs at least one token")
        with self.session(context=array.size if context is None else context, kv=kv, beyond_trained=beyond_trained) as session:
            return session.logits(array, chunk)

    def session(self, *, context: int | None = None, kv: str | None = None, beyond_trained: bool = False,
                window_size: int | None = None, sink_size: int | None = None, rollback_tokens: int | None = None,
                profile: ProfileLike | None = None, index: str = "auto", sketch: tuple[int, int] | None = None) -> Session:
        """An empty session.

        context          most tokens it may hold; None is the trained length. Costs nothing until used
        kv               "f32", "bf16", "int8", "compact", "vtq" or "auto", as in `load`; None takes the model's
        beyond_trained   allow a context above the trained length
        window_size, sink_size, rollback_tokens   see hsr_session_opts in hisparse_rt.h; None is the profile's, then its default
        profile          how its prompts and requests attend: a Profile, the name of a preset, or an id; None takes the model's
        index            what selectors may read: "sketch", "minmax", "gaussian", "none"; "auto" is what the profile needs
        sketch           components of a sketch at 4 and at 2 bits; None is (24, 0)
        """
        profile = self.profile if profile is None else profile
        pages = self._pages(profile)
        pages |= {name: value for name, value in (("window_size", window_size), ("sink_size", sink_size)) if value is not None}
        return Session(self, context=context, kv=kv or self.kv, beyond_trained=beyond_trained, rollback_tokens=rollback_tokens,
                       profile=profile, index=index, sketch=sketch, **pages)

    @staticmethod
    def _pages(profile: ProfileLike) -> dict[str, int]:
        from .profile import as_profile

        return {} if isinstance(profile, int) else as_profile(profile).session_options()

    def restore(self, path: str | bytes | os.PathLike[Any], *, context: int | None = None, kv: str | None = None,
                beyond_trained: bool = False, profile: ProfileLike | None = None,
                progress: Callable[[int, int], object] | None = None) -> Session:
        """A session from a file of `Session.save`: its next token is the one that the saved session would have had.

        context, beyond_trained   as in `session`; None is what it had
        kv                        refuse a session of another key-value format; None takes what it has
        profile                   as in `session`: profiles are not saved. None takes the model's
        progress                  `progress(done, total)` is called in between, on this thread, with bytes

        FileError, FormatError (damaged, or saved with another model or calibration), ContextError, NoSpaceError, InvalidError.
        """
        return Session._restore(self, path, context, kv, beyond_trained, self.profile if profile is None else profile, progress)

    def _restore_alike(self, path: str | bytes | os.PathLike[Any], context: int, kv: str | None, beyond_trained: bool,
                       progress: Callable[[int, int], object] | None) -> Session:
        """As `restore`; InvalidError for what `session` with these options, given the same tokens, would not have become."""
        like = Session._options(self, kv=kv or self.kv, profile=self.profile, **self._pages(self.profile))
        return Session._restore(self, path, context, kv, beyond_trained, self.profile, progress, like)

    def profile_id(self, profile: ProfileLike) -> int:
        """The id of a profile in this model's engine, which registers it at its first use."""
        from .profile import as_profile

        if isinstance(profile, int) and not isinstance(profile, bool):
            return profile
        chosen = self.for_layers(as_profile(profile))
        with self._lock:
            if chosen not in self._profiles:
                self._profiles[chosen] = self._register(chosen)
            return self._profiles[chosen]

    def for_layers(self, profile: Profile) -> Profile:
        """The profile with this model's layers in place of their classes."""
        return profile.for_layers(self._layer_classes if profile.dense_classes or profile.class_budgets else None)

    @functools.cached_property
    def _layer_classes(self) -> tuple[str, ...] | None:
        from .calibration import read_calibration

        return None if self._calibration is None else read_calibration(os.fsdecode(self._calibration)).classes

    def _register(self, profile: Profile) -> int:
        native, number = ffi.new("hsr_profile *"), ffi.new("int32_t *")
        lib.hsr_profile_init(native, ffi.sizeof("hsr_profile"))
        arrays = []   # keep what native points to
        for name, value in profile.native_fields(self.info.n_layers).items():
            if isinstance(value, (list, tuple)):
                arrays.append(ffi.new("int32_t[]", list(value)))
                setattr(native, "n_" + name, len(value))
                setattr(native, name, arrays[-1])
            else:
                setattr(native, name, value)
        with self._native.engine.lock:
            call(lib.hsr_profile_register, self._native.engine.pointer, native, number)
        return int(number[0])

    @overload
    def chat(self, messages: str | Sequence[Message], *, stream: Literal[True], system: str | None = ...,
             history: Sequence[Message] | None = ..., tools: Sequence[Any] | None = ..., variables: Mapping[str, Any] | None = ...,
             **options: Unpack[RequestOptions]) -> Stream: ...
    @overload
    def chat(self, messages: str | Sequence[Message], *, return_details: Literal[True], system: str | None = ...,
             history: Sequence[Message] | None = ..., tools: Sequence[Any] | None = ..., variables: Mapping[str, Any] | None = ...,
             **options: Unpack[RequestOptions]) -> Result: ...
    @overload
    def chat(self, messages: str | Sequence[Message], *, system: str | None = ..., history: Sequence[Message] | None = ...,
             tools: Sequence[Any] | None = ..., variables: Mapping[str, Any] | None = ...,
             **options: Unpack[RequestOptions]) -> str: ...

    def chat(
        self, messages: str | Sequence[Message], *, system: str | None = None, history: Sequence[Message] | None = None,
        tools: Sequence[Any] | None = None, variables: Mapping[str, Any] | None = None, **options: Any,
    ) -> Any:
        """The assistant's answer to a user's text, or to a list of {"role", "content"} messages. `history` goes before.

        Options and result are those of `hisparse_rt.generate`. The chat template is the model's own; TemplateError if it has
        none. For a chat of many turns, `conversation` keeps what is computed.
        """
        from .generate import generate

        ids = self.chat_ids(messages, system=system, history=history, tools=tools, variables=variables)
        return generate(self, ids, **options)

    def require_chat(self) -> None:
        """TemplateError or TokenizerError if this model cannot chat, without waiting for a first message."""
        _ = self._codec, self._template

    def conversation(self, *, system: str | None = None, **session_options: Any) -> Conversation:
        """A chat that remembers. Options are those of `session`."""
        from .conversation import Conversation

        return Conversation(self, system=system, **session_options)

    def agenerate(self, prompt: str | Ids, *, context: int | None = None, kv: str | None = None, beyond_trained: bool = False,
                  **options: Unpack[SamplingOptions]) -> AsyncStream:
        """For `async for`: pieces of text, computed on another thread. Cancelling the task ends the work within a step."""
        from .aio import AsyncStream
        from .generate import start

        return AsyncStream(self, lambda: start(self, prompt, context=context, kv=kv, beyond_trained=beyond_trained, **options))

    def achat(self, messages: str | Sequence[Message], *, system: str | None = None, history: Sequence[Message] | None = None,
              tools: Sequence[Any] | None = None, variables: Mapping[str, Any] | None = None,
              **options: Unpack[SamplingOptions]) -> AsyncStream:
        """`chat` for `async for`."""
        ids = self.chat_ids(messages, system=system, history=history, tools=tools, variables=variables)
        return self.agenerate(ids, **options)

    def cancel(self) -> None:
        """End the work of all sessions at the next step. From any thread."""
        with self._native.engine.lock:
            call(lib.hsr_engine_cancel, self._native.engine.pointer)

    # ---- end

    def close(self) -> None:
        """Free everything now: sessions and streams end, then the engine and the weights. A second call does nothing.

        Work of other threads is cancelled and waited for; BusyError if it does not end.
        """
        if self.closed:
            return
        deadline = time.monotonic() + _CLOSE_SECONDS
        while True:
            try:
                for session in list(self._sessions):
                    session.close()
                self._native.engine.close()
                break
            except BusyError:
                if time.monotonic() > deadline:
                    raise
                self.cancel()
                time.sleep(0.001)
        self._native.model.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    @property
    def closed(self) -> bool:
        return self._native.engine.closed

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.info.arch}, {self.info.dtype}"
        return f"<hisparse_rt.Model {self.path!r}: {state}>"

    __reduce_ex__ = refuse_copies("model", "load the file again in the other process: its memory is shared")

    # ---- inside

    def _read_info(self) -> ModelInfo:
        native = new_struct("hsr_model_info")
        call(lib.hsr_model_get_info, self._native.model.pointer, native)
        values = {field.name: getattr(native, field.name) for field in fields(ModelInfo) if hasattr(native, field.name)}
        return ModelInfo(**{
            **values,
            "arch": ffi.string(native.arch).decode(),
            "dtype": DTYPES.get(native.weight_dtype, "?"),
            "bos_token": None if native.bos_token < 0 else native.bos_token,
            "eos_tokens": tuple(native.eos_tokens[i] for i in range(native.n_eos_tokens)),
        })

    def _check_open(self) -> None:
        if self.closed:
            raise StateError("this model is closed")

    @functools.cached_property
    def _codec(self) -> TextCodec:
        from .tokenizer import TextCodec

        self._check_open()
        source = self.metadata("tokenizer.huggingface.json")
        if source is None:
            raise TokenizerError("the model file has no tokenizer: give token ids instead of text")
        return TextCodec(source, self.info.vocab_size, self.info.bos_token, self.info.eos_tokens, self.metadata("tokenizer.chat_template"))

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        from .template import ChatTemplate

        self._check_open()
        source = self.metadata("tokenizer.chat_template")
        if source is None:
            raise TemplateError("the model has no chat template: use generate with a prompt in the form the model was trained on (--raw "
                                "on the command line)")
        return ChatTemplate(source, self._json_object("hisparse.special_tokens"))

    def _json_object(self, key: str) -> dict[str, Any]:
        try:
            value = json.loads(self.metadata(key) or "{}")
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{self.path}: {key} is not valid JSON: {error}") from error
        if not isinstance(value, dict):
            raise FormatError(f"{self.path}: {key} is not a JSON object")
        return value

    def _detokenizer(self) -> Detokenizer | None:
        """None for a model without tokenizer: its requests give tokens, and no text."""
        self._check_open()
        return self._codec.detokenizer() if self.metadata("tokenizer.huggingface.json") is not None else None

    def _worker(self) -> concurrent.futures.ThreadPoolExecutor:
        """Threads on which asynchronous callers wait; each running stream occupies one."""
        with self._lock:
            self._check_open()
            if self._threads is None:
                self._threads = concurrent.futures.ThreadPoolExecutor(max_workers=256, thread_name_prefix="hisparse_rt")
            return self._threads


def engine_options(
    *, ram: int | str | None, hot: int | str | None, warm: int | str | None, cold: str | bytes | os.PathLike[Any] | None,
    cold_size: int | str | None, io: str, io_deadline: float, importance: str | Mapping[str, Any], prefetch: int,
    prefetch_sources: Iterable[str] | None, threads: int, isa: str, kv: str, chunk: int, max_sessions: int, max_batch: int,
    log: logging.Logger | None, debug_async: bool, readable_tiers: str,
) -> Any:
    """The options of `load` as an hsr_engine_opts; an error if one of them is wrong."""
    if ram is not None and (hot is not None or warm is not None):
        raise InvalidError("give ram, or hot and warm, not both: they name the same budget")
    for name, value, known in (("io", io, IO_ENGINES), ("readable_tiers", readable_tiers, READABLE)):
        if value not in known:
            raise InvalidError(f"{name} is {value!r}, known ones are {', '.join(known)}")
    if cold_size is not None and cold is None:
        raise InvalidError("cold_size without cold: name the directory of the cold tier")
    if isa not in ISA_LEVELS:
        raise InvalidError(f"isa is {isa!r}, known levels are {', '.join(ISA_LEVELS)}")
    if kv not in KV_FORMATS:
        raise InvalidError(f"kv is {kv!r}, known formats are {', '.join(KV_FORMATS)}")
    if log is not None and not hasattr(log, "getEffectiveLevel"):
        raise TypeError(f"log must be a logging.Logger, not {type(log).__name__}")
    opts = ffi.new("hsr_engine_opts *")
    lib.hsr_engine_opts_init(opts, ffi.sizeof("hsr_engine_opts"))
    opts.isa = ISA_LEVELS[isa]
    opts.n_threads = integer("threads", threads, 0, 1024)
    opts.chunk_tokens = integer("chunk", chunk, 1, 4096)
    opts.max_sessions = integer("max_sessions", max_sessions, 1, 65536)
    opts.max_batch = integer("max_batch", max_batch, 1, (1 << 31) - 1)
    budget = hot if ram is None else ram
    opts.hot_bytes = 0 if budget is None else check_budget(budget)
    opts.flags = lib.HSR_ENGINE_ASYNC_DEBUG if debug_async else 0
    opts.warm_bytes = 0 if warm is None else parse_size(warm)
    opts.cold_bytes = 0 if cold_size is None else check_budget(cold_size)
    opts.io_engine = IO_ENGINES[io]
    _fill_importance(opts, importance)
    opts.io_deadline_ms = milliseconds("io_deadline", io_deadline)
    opts.readable_tiers = READABLE[readable_tiers]
    opts.prefetch_depth = integer("prefetch", prefetch, 0, 4096)
    if prefetch_sources is not None:
        opts.prefetch_sources = _sources(prefetch_sources)
    if cold is not None:
        _DIRECTORIES[opts] = ffi.new("char[]", _path_bytes(cold))
        opts.cold_dir = _DIRECTORIES[opts]
    return opts


def _fill_importance(opts: Any, importance: str | Mapping[str, Any]) -> None:
    """A preset, or one with numbers in place of its own."""
    wishes = importance if isinstance(importance, Mapping) else {"preset": importance}
    unknown = [name for name in wishes if name not in ("preset", "weights", "enter", "leave")]
    if unknown:
        raise InvalidError(f"importance has {unknown[0]!r}, known ones are preset, weights, enter, leave")
    preset = wishes.get("preset", "balanced")
    if preset not in IMPORTANCES:
        raise InvalidError(f"importance is {preset!r}, known ones are {', '.join(IMPORTANCES)}")
    opts.importance = IMPORTANCES[preset]
    if "weights" in wishes:
        weights = wishes["weights"]
        if not isinstance(weights, Sequence) or len(weights) != 3 or not any(weights):
            raise InvalidError(f"importance weights are {weights!r}: give three numbers, of locality, frequency and recency, not all 0")
        opts.weight_locality, opts.weight_frequency, opts.weight_recency = (float(weight) for weight in weights)
    opts.enter_above = float(wishes.get("enter", opts.enter_above))
    opts.leave_below = float(wishes.get("leave", opts.leave_below))


_DIRECTORIES: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""What the options' cold_dir points to lives as long as they do."""


def _path_bytes(path: str | bytes | os.PathLike[Any]) -> bytes:
    name = os.fsencode(path)
    if b"\0" in name:
        raise InvalidError("the path has a NUL character in it")
    return name


def _sources(names: Iterable[str]) -> int:
    sources = 0
    for name in [names] if isinstance(names, str) else names:
        if name not in PREFETCH_SOURCES:
            raise InvalidError(f"prefetch_sources has {name!r}, known ones are {', '.join(PREFETCH_SOURCES)}")
        sources |= PREFETCH_SOURCES[name]
    return sources


def check_budget(value: int | str) -> int:
    """Bytes of a memory budget; InvalidError if it is none."""
    size = parse_size(value)
    if size < 1 << 20:
        raise InvalidError(f"a memory budget of {size} bytes is less than one block of 1 MiB")
    return size
