# SPDX-License-Identifier: Apache-2.0
"""A file that spares computing a prompt twice: a saved session whose tokens begin as the prompt does."""
from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import ContextError, FileError, FormatError, InvalidError, StateError, UnsupportedError, from_os_error
from .progress import bar
from .session import Session

if TYPE_CHECKING:
    from .model import Model

log = logging.getLogger("hisparse_rt")

Progress: TypeAlias = Callable[[int, int], object]
Path: TypeAlias = str | bytes | os.PathLike[Any]

_MAGIC = b"HSRSAVE"


def cached_session(
    model: Model, ids: npt.NDArray[np.int32], path: Path, options: dict[str, Any], exactly: bool = False,
    progress: Progress | None = None,
) -> Session:
    """A session that has computed `ids`, as far as possible with what the file at `path` has. If that was not all, the file is
    written anew.

    options   of `Model.session`, with a context
    exactly   the context was asked for; otherwise it may be longer, up to what the model was trained for, to hold what the file has

    A file that is damaged, or of another model, calibration, profile or key-value format is warned of and replaced. InvalidError for one
    that is no saved session: that is left as it is; FileMissingError if its folder is not there.
    """
    session = _restore(model, path, options, exactly, progress) if _exists(path) else None
    if session is not None:
        session = _cut(session, ids)
    if session is None:
        session = model.session(**options)
    try:
        held = session.n_tokens
        if held < len(ids):
            session._append(np.ascontiguousarray(ids[held:]))
            session.prefill(progress)
            _keep(session, path, progress)
    except BaseException:
        session.close()
        raise
    return session


def _exists(path: Path) -> bool:
    """Is there a saved session, of whatever model? Told before anything is computed: InvalidError if there is something else."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for a writer
            raise InvalidError(f"{os.fsdecode(path)} is not a regular file, and cannot keep a prompt")
        with open(path, "rb") as file:
            start = file.read(len(_MAGIC))
    except FileNotFoundError as error:
        if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
            raise from_os_error(f"cannot write {os.fsdecode(path)}", error) from error
        return False
    except OSError as error:
        raise from_os_error(f"cannot read {os.fsdecode(path)}", error) from error
    if start and start != _MAGIC:
        raise InvalidError(f"{os.fsdecode(path)} is not a saved session, and is left as it is")
    return bool(start)


def _restore(model: Model, path: Path, options: dict[str, Any], exactly: bool, progress: Progress | None) -> Session | None:
    try:
        with _bar("restoring the prompt", progress) as report:
            try:
                return model._restore_alike(path, **options, progress=report)
            except ContextError:  # what is kept is longer than this prompt; what does not belong to it is cut off
                if exactly or model.metadata("hisparse.rope.kind") != "static":
                    raise
                options = {**options, "context": max(model.info.context_length, options["context"])}
                return model._restore_alike(path, **options, progress=report)
    except (FormatError, ContextError, InvalidError, UnsupportedError) as error:
        log.warning("the prompt is computed again, its cache is of no use: %s", error)
        return None


def _keep(session: Session, path: Path, progress: Progress | None) -> None:
    """What was computed is worth more than the file: if that cannot be written, the answer comes all the same."""
    try:
        with _bar("keeping the prompt", progress) as report:
            session.save(path, report)
    except FileError as error:
        log.warning("the prompt is not kept: %s", error)


def _bar(label: str, wanted: Progress | None) -> contextlib.AbstractContextManager[Progress | None]:
    """Of bytes: whoever follows the tokens sees where else the time goes."""
    return contextlib.nullcontext() if wanted is None else bar(label, "B")


def _cut(session: Session, ids: npt.NDArray[np.int32]) -> Session | None:
    """The session with only those of its tokens that begin `ids`; None, and it is closed, if that is too far back."""
    try:
        session._cut_to_beginning_of(ids)
    except StateError:
        session.close()
        return None
    return session
