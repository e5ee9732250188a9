# SPDX-License-Identifier: Apache-2.0
"""Opening a model, converting it first if it is not in the runtime's own format."""
from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from . import progress
from .calibration import beside
from .errors import FileMissingError, FormatError, HisparseError, InvalidError, from_os_error
from .model import DTYPES, Model, engine_options

if TYPE_CHECKING:
    from .profile import ProfileLike


def load(
    path: str | bytes | os.PathLike[Any], *, ram: int | str | None = None, hot: int | str | None = None, warm: int | str | None = None,
    cold: str | bytes | os.PathLike[Any] | None = None, cold_size: int | str | None = None, io: str = "auto", io_deadline: float = 30.0,
    importance: str | Mapping[str, Any] = "balanced", prefetch: int = 4, prefetch_sources: Iterable[str] | None = None, threads: int = 0,
    isa: str = "auto", kv: str = "auto", chunk: int = 512, max_sessions: int = 256, max_batch: int = 1024, dtype: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None, log: logging.Logger | None = None, debug_async: bool = False,
    readable_tiers: str = "all", profile: ProfileLike = 0, calibration: str | bytes | os.PathLike[Any] | Literal[False] | None = None,
) -> Model:
    """Open a model.

    path          a `.hsr` file; or a Hugging Face folder or `.gguf` file, which is converted once and kept in a cache
    ram, hot      budget of the key-value memory: bytes, or a text such as "4GiB". None: half of the memory now available
    warm          more of it for pages that are read less; on the CPU one pool with hot. ram is both
    cold          directory of a file, gone with the process, for pages that memory does not hold; best on NVMe
    cold_size     most that the file may take; None: half of what is free there
    io            how it is read and written: "uring", "pread", or "auto"
    io_deadline   seconds after which a page that is waited for fails its session
    importance    which pages stay in memory: "balanced", "summarize" (near ones), "chat" (those attended most); or {"preset": one of these,
                  "weights": three numbers, of nearness, attention and recency, "enter": the worth above which pages come back unasked,
                  "leave": the score below which they go so}, each in place of the preset's; enter is 0.7 and leave 0.5
    prefetch      groups of pages read ahead of need; 0: none
    prefetch_sources   why they are: "groups" (the next to be attended), "rising" (pages that left and are worth much), "query" (those
                  that the next layer is guessed to select, of sparse sessions). None: the first two. Results are the same with any
    threads       threads that compute, 0 to 1024; 0: as many as the machine gives this process
    isa           highest instruction set to use: "auto", "reference", "avx2", "avx512" or "amx"
    kv            key-value format of sessions: "f32", "bf16", "int8", "compact" and "vtq" (which need a calibration), or "auto": f32 for
                  models of dtype f32, else bf16, or int8 for sparse sessions of a model without a calibration
    chunk         most tokens of one prompt in one step, 1 to 4096
    max_sessions, max_batch   most sessions at a time; most rows of one step
    dtype         for conversion: "f32", "bf16", "q8" (the default) or "q4"
    cache_dir     where converted models are kept; None: $XDG_CACHE_HOME/hisparse_rt, or ~/.cache/hisparse_rt
    log           a logging.Logger for what the engine has to say, such as that "auto" does without a calibration; None: silent
    profile       how sessions attend unless they say otherwise: a Profile, the name of a preset, a JSON file; 0 and "exact" are dense
    calibration   the model's `.hsrcal` file; None: the one beside the model, which a conversion makes with it; False: none
    readable_tiers   memory that attention reads in place: "all", or "hot": pages must then move there from warm memory, as on a GPU.
                  Same results, slower, for tests; warm needs cold then
    debug_async   run in the slow mode that finds ordering mistakes in the runtime

    FileError, FormatError, VersionError, UnsupportedError, OutOfMemoryError, InvalidError; all are HisparseError.
    """
    source = os.fspath(path)
    name = os.fsdecode(source)
    engine: dict[str, Any] = {
        "ram": ram, "hot": hot, "warm": warm, "cold": cold, "cold_size": cold_size, "io": io, "io_deadline": io_deadline,
        "importance": importance, "prefetch": prefetch, "prefetch_sources": prefetch_sources, "threads": threads, "isa": isa, "kv": kv,
        "chunk": chunk, "max_sessions": max_sessions, "max_batch": max_batch, "log": log, "debug_async": debug_async,
        "readable_tiers": readable_tiers,
    }
    engine_options(**engine)  # a wrong option is told before a long conversion
    if profile != 0 or isinstance(profile, bool):
        from .profile import as_profile

        profile = as_profile(profile)
    if calibration not in (None, False) and not os.path.exists(calibration):
        raise FileMissingError(f"{os.fsdecode(calibration)!a}: no such file", sys_code=2)
    if dtype is not None and dtype not in DTYPES.values():
        raise InvalidError(f"dtype is {dtype!r}, known ones are {', '.join(DTYPES.values())}")
    if os.path.isdir(name) or name.lower().endswith(".gguf"):
        source = _converted(name, dtype or "q8", cache_dir)
        if calibration is None:
            _calibrate(source, log, threads=threads, isa=isa)
    elif dtype is not None:
        raise InvalidError(f"dtype is for conversion, and {name!a} is not a folder or a .gguf file")
    if calibration is None:
        path = beside(os.fsdecode(source))
        calibration = path if os.path.exists(path) else False
    return Model(source, **engine, profile=profile, calibration=None if calibration is False else calibration)


def _calibrate(model: str, log: logging.Logger | None, **engine: Any) -> None:
    """Make the calibration of a converted model, once. Where that fails the model still computes, without sketches."""
    from .tools.calibrate import calibrate_file

    if os.path.exists(beside(model)):
        return
    try:
        with progress.bar("calibrating", "tok") as report:
            calibrate_file(model, report, **engine)
    except HisparseError as error:
        if log is not None:
            log.warning("the model could not be calibrated: %s", error)


def _converted(source: str, dtype: str, cache_dir: str | os.PathLike[str] | None) -> str:
    """The cached conversion of `source`, made now if there is none.

    Several processes may do this at once: each writes a temporary file, and the last to rename it wins with the same bytes.
    """
    from .tools.convert import ConvertError, convert
    from .tools.hsr_file import FORMAT_VERSION

    if not os.path.exists(source):
        raise FileMissingError(f"{source!a}: no such file", sys_code=2)
    folder = Path(cache_dir) if cache_dir is not None else _default_cache()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise from_os_error(f"cannot make the folder {str(folder)!a} for converted models", error) from error
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", Path(os.path.abspath(source)).name.removesuffix(".gguf"))[:80]
    target = folder / f"{stem}-{dtype}-{_key(source, dtype, FORMAT_VERSION)}.hsr"
    if not target.exists():
        with progress.bar("converting", "B") as report:
            try:
                convert(source, target, dtype, progress=report and (lambda done, total, name: report(done, total)))
            except ConvertError as error:
                raise FormatError(str(error)) from error
    return str(target)


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "hisparse_rt"


def _key(source: str, dtype: str, version: int) -> str:
    """Changes whenever a file of the source does. Names, sizes and times are enough, and cost no reading of gigabytes."""
    digest = hashlib.sha256(f"{version}\0{dtype}\0".encode() + os.fsencode(os.path.realpath(source)))
    try:
        files = sorted(Path(source).iterdir()) if os.path.isdir(source) else [Path(source)]
    except OSError as error:
        raise from_os_error(f"cannot read {source!a}", error) from error
    for file in files:
        if file.suffix in (".safetensors", ".json", ".gguf", ".jinja", ".model", ".txt") and file.is_file():
            facts = file.stat()
            digest.update(os.fsencode(file.name) + f"\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:24]
