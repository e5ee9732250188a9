# SPDX-License-Identifier: Apache-2.0
"""Every failure of the runtime as an exception.

All of them are `HisparseError`. Where a failure has a natural Python kind it is that too, so `except ValueError`,
`except MemoryError` and `except OSError` work without knowing this module.
"""
from __future__ import annotations

import errno
import functools
from typing import Any


class HisparseError(Exception):
    """Base of all errors of this package.

    status    the library's number of the failure (negative, fixed for ever), or 0 where Python itself noticed it
    sys_code  errno where the operating system refused, else 0
    """

    status: int = 0
    sys_code: int = 0

    def __init__(self, message: str, *, sys_code: int = 0) -> None:
        super().__init__(message)
        self.sys_code = sys_code


class InvalidError(HisparseError, ValueError):
    """An argument is wrong. Nothing was changed."""

    status = -1


class OutOfMemoryError(HisparseError, MemoryError):
    """The system refused memory."""

    status = -2


class BusyError(HisparseError, RuntimeError):
    """Another thread, or an unfinished stream, is using this session."""

    status = -3


class FileError(HisparseError, OSError):
    """A system call on a file failed; `errno` and `sys_code` say why."""

    status = -4

    def __init__(self, message: str, *, sys_code: int = 0) -> None:
        super().__init__(message, sys_code=sys_code)
        self.errno = sys_code or None

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> Any:  # OSError's own loses errno
        return functools.partial(type(self), sys_code=self.sys_code), self.args, self.__dict__


class FileMissingError(FileError, FileNotFoundError):
    """There is no such file."""


class FormatError(HisparseError, ValueError):
    """A file is damaged, cut short, or not what it claims to be."""

    status = -5


class ForkedError(HisparseError, RuntimeError):
    """The object was made before fork() and used in the child process. Load the model in the child instead."""

    status = -6


class UnsupportedError(HisparseError, RuntimeError):
    """Valid, but not possible with this version, build or machine."""

    status = -7


class NoSpaceError(HisparseError, MemoryError):
    """A memory budget given to `load` cannot hold the request; the message names the short number."""

    status = -8


class ContextError(HisparseError, ValueError):
    """The context length would be passed."""

    status = -9


class TokenError(HisparseError, ValueError):
    """A token id is outside the model's vocabulary."""

    status = -10


class NonFiniteError(HisparseError, ArithmeticError):
    """The model produced NaN or infinity for this session."""

    status = -11


class WorkCancelledError(HisparseError):
    """`cancel()` ended the work."""

    status = -12


class StateError(HisparseError, RuntimeError):
    """The call does not fit the object's present state: closed, empty, or a request is running."""

    status = -13


class VersionError(FormatError):
    """A model file of another format version: convert the model again."""

    status = -14


class InternalError(HisparseError, RuntimeError):
    """A defect of the library; please report it."""

    status = -15


class TokenizerError(HisparseError, ValueError):
    """The model has no usable tokenizer, or the text cannot be encoded with it."""


class TemplateError(HisparseError, ValueError):
    """The model has no chat template, or the template refused the messages."""


_BY_STATUS: dict[int, type[HisparseError]] = {
    kind.status: kind
    for kind in (
        InvalidError, OutOfMemoryError, BusyError, FileError, FormatError, ForkedError, UnsupportedError, NoSpaceError,
        ContextError, TokenError, NonFiniteError, WorkCancelledError, StateError, VersionError, InternalError,
    )
}


def from_os_error(what: str, error: OSError) -> FileError:
    """A refusal of the operating system as "what: why"."""
    kind = FileMissingError if error.errno == errno.ENOENT else FileError
    return kind(f"{what}: {error.strerror or error}", sys_code=error.errno or 0)


def from_status(status: int, message: str, sys_code: int = 0) -> HisparseError:
    """The exception for a status of the library; an unknown number gives a plain HisparseError that carries it.

    Without a message, the words that describe the kind have to do.
    """
    kind = _BY_STATUS.get(status, HisparseError)
    if kind is FileError and sys_code == errno.ENOENT:
        kind = FileMissingError
    if not message:
        message = f"status {status}" if kind is HisparseError else str(kind.__doc__).partition(".")[0]
    error = kind(message, sys_code=sys_code)
    error.status = status
    return error
