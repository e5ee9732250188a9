# SPDX-License-Identifier: Apache-2.0
"""What sessions would need, and whether they would be admitted, without loading a model."""
from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ._library import call, ffi, lib, new_struct
from .checks import file_name, integer
from .errors import FormatError, InvalidError
from .model import DTYPES, engine_options
from .session import INDEX_KINDS, KV_FORMATS
from .sizes import format_size

if TYPE_CHECKING:
    from .profile import ProfileLike

_SHORT = {lib.HSR_SHORT_MEMORY: "memory", lib.HSR_SHORT_COLD: "cold storage", lib.HSR_SHORT_SESSIONS: "sessions"}
_DTYPE_NUMBERS = {name: number for number, name in DTYPES.items()}
_INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes by what they are for, and the verdict. See hsr_plan in hisparse_rt.h."""

    fits: bool
    """An engine with these options admits all sessions, each up to its context."""
    short_of: str | None
    """"memory", "cold storage" or "sessions", if it does not fit."""
    short_needed: int
    short_available: int
    sessions: int
    n_resident: int
    """Sessions whose pages all stay in memory; those of the others may leave for the cold file."""
    context: int
    kv_format: str
    weight_bytes: int
    scratch_bytes: int
    plain_bytes: int
    """Of one session: pages as they are written; with an encoded format or a cold tier only the most recent ones."""
    sealed_bytes: int
    """Of one session: all other pages."""
    index_bytes: int
    table_bytes: int
    history_bytes: int
    """Of one session: how much attention its pages got, if its profile keeps that (forced_history, selector "history"), else 0."""
    session_blocks: int
    """Blocks of 1 MiB that one session takes if all of it stays in memory."""
    memory_bytes: int
    """Key-value memory of all sessions that is promised at admission."""
    memory_budget: int
    cold_bytes: int
    cold_budget: int
    total_bytes: int
    """Memory of the process at most, apart from its code."""

    @property
    def shortage(self) -> str | None:
        """What is lacking, in words; None if it fits."""
        if self.fits:
            return None
        if self.short_of == "sessions":
            return f"{self.short_needed} sessions, and max_sessions is {self.short_available}"
        return (f"short of {self.short_of}: {format_size(self.short_needed)} are needed, {format_size(self.short_available)} are there; "
                f"{format_size(self.short_needed - self.short_available)} more would do")


def plan(
    source: str | bytes | os.PathLike[Any], *, context: int | None = None, sessions: int = 1, dtype: str | None = None, kv: str = "auto",
    beyond_trained: bool = False, profile: ProfileLike = 0, window_size: int | None = None, sink_size: int | None = None,
    rollback_tokens: int | None = None, calibrated: bool | None = None, **engine: Any,
) -> Plan:
    """Plan `sessions` sessions of `context` tokens.

    source       a `.hsr` file; or a Hugging Face folder, a config.json alone, or a `.gguf` file, whose weights are estimated as
                 converted to `dtype` ("q8" unless given)
    calibrated   whether there is a calibration, which decides what index a profile with selector "auto" uses, and what kv "auto" is
                 in sparse sessions; None: if one lies beside the model
    engine       options of `load` about memory: ram, hot, warm, cold, cold_size, chunk, max_sessions, max_batch
    The other options are those of `Model.session`.

    FormatError, ContextError, UnsupportedError, InvalidError, FileError.
    """
    info = _read_info(os.fsdecode(file_name(source)), dtype)
    options = engine_opts(**engine)
    if kv not in KV_FORMATS:
        raise InvalidError(f"kv is {kv!r}, known formats are {', '.join(KV_FORMATS)}")
    session = ffi.new("hsr_session_opts *")
    lib.hsr_session_opts_init(session, ffi.sizeof("hsr_session_opts"))
    session.beyond_trained = bool(beyond_trained)
    session.context = 0 if context is None else integer("context", context, 1, _INT32_MAX)
    from .profile import PRESETS, as_profile
    from .profile_index import format_of, keeps_history, own_index

    chosen = PRESETS["exact"] if isinstance(profile, int) and profile == 0 else as_profile(profile)
    has_calibration = _is_calibrated(os.fsdecode(file_name(source))) if calibrated is None else calibrated
    session.index_kind = INDEX_KINDS[own_index(chosen, has_calibration)]
    kv = format_of(kv, chosen, has_calibration, DTYPES[info.weight_dtype])
    session.kv_format = KV_FORMATS[kv]
    given = {"window_size": window_size, "sink_size": sink_size, "rollback_tokens": rollback_tokens}
    for name, value in (chosen.session_options() | {name: value for name, value in given.items() if value is not None}).items():
        setattr(session, name, integer(name, value, 0, _INT32_MAX))
    result = new_struct("hsr_plan_result")
    count = integer("sessions", sessions, 1, 65536)
    call(lib.hsr_plan, info, options, session, count, result)
    values = {field.name: getattr(result, field.name) for field in fields(Plan) if hasattr(result, field.name)}
    kept: int = result.history_bytes if keeps_history(chosen) else 0
    return Plan(**{**values, "fits": bool(result.fits), "short_of": _SHORT.get(result.short_of), "sessions": count,
                   "history_bytes": kept, "total_bytes": result.total_bytes + count * kept,
                   "kv_format": kv})


def engine_opts(**given: Any) -> Any:
    """The options of `load` that a plan counts with, as an hsr_engine_opts."""
    known = {"ram": None, "hot": None, "warm": None, "cold": None, "cold_size": None, "io": "auto", "io_deadline": 30.0,
             "importance": "balanced", "prefetch": 4, "prefetch_sources": None, "threads": 0, "isa": "auto", "kv": "auto", "chunk": 512,
             "max_sessions": 256, "max_batch": 1024, "log": None, "debug_async": False, "readable_tiers": "all"}
    for name in given:
        if name not in known:
            raise TypeError(f"plan() has no option {name!r}")
    return engine_options(**(known | given))


def _is_calibrated(name: str) -> bool:
    return os.path.exists(name.removesuffix(".hsr") + ".hsrcal")


def _read_info(name: str, dtype: str | None) -> Any:
    """An hsr_model_info of a model file, or of what it would be after conversion."""
    from .tools.errors import ConvertError
    from .tools.model_sizes import sizes

    info = new_struct("hsr_model_info")
    is_source = os.path.isdir(name) or name.lower().endswith((".json", ".gguf"))
    if not is_source:
        if dtype is not None:
            raise InvalidError(f"dtype is for conversion, and {name!a} is not a folder, a config.json or a .gguf file")
        model = ffi.new("hsr_model **")
        call(lib.hsr_model_open, os.fsencode(name), model)
        try:
            call(lib.hsr_model_get_info, model[0], info)
        finally:
            lib.hsr_model_close(model)
        return info
    if dtype is not None and dtype not in _DTYPE_NUMBERS:
        raise InvalidError(f"dtype is {dtype!r}, known ones are {', '.join(_DTYPE_NUMBERS)}")
    try:
        found = sizes(name, dtype or "q8")
    except ConvertError as error:
        raise FormatError(str(error)) from error
    for field, value in found.items():
        setattr(info, field, value)
    info.weight_dtype = _DTYPE_NUMBERS[dtype or "q8"]
    return info
