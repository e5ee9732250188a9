# SPDX-License-Identifier: Apache-2.0
"""The loaded C library: `ffi`, `lib`, and the few things every call needs (errors, handles, callbacks).

cffi releases the interpreter lock during every call, so a Python thread that computes does not stop the others.
"""
from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from . import errors

try:
    from . import _cffi  # type: ignore[attr-defined]
except ImportError as error:  # the package was found, its compiled half was not
    raise ImportError(f"hisparse_rt: the extension module does not load ({error}); reinstall the package") from error

ffi: Any = _cffi.ffi
lib: Any = _cffi.lib

if lib.hsr_abi_version() != lib.HSR_ABI_VERSION:
    raise ImportError(
        f"hisparse_rt: the extension was built for ABI {lib.HSR_ABI_VERSION}, "
        f"but the library that was loaded has ABI {lib.hsr_abi_version()}; reinstall the package"
    )

__version__: str = ffi.string(lib.hsr_version()).decode()


def new_struct(kind: str) -> Any:
    """A zeroed C struct with struct_size set."""
    struct = ffi.new(f"{kind} *")
    struct.struct_size = ffi.sizeof(kind)
    return struct


def call(function: Callable[..., int], *arguments: Any, err: Any = None) -> int:
    """Call a function whose last parameter is `hsr_error *err`; raise on failure, return HSR_OK or a notice."""
    err = new_struct("hsr_error") if err is None else err
    status = function(*arguments, err)
    if status < 0:
        raise errors.from_status(status, error_text(err), err.sys_code)
    return status


def error_text(err: Any) -> str:
    return ffi.string(err.message).decode("utf-8", "replace")


class Handle:
    """One native object, destroyed exactly once: by close(), by the garbage collector, or at interpreter exit.

    owner    the Python object whose end is the native object's end
    destroy  the library's function, which takes the address of the handle and an hsr_error
    keep     what must live at least as long
    """

    def __init__(self, owner: object, kind: str, destroy: Callable[[Any, Any], int], keep: object = None) -> None:
        self.box = ffi.new(f"{kind} **")
        self.lock = threading.Lock()  # held while the pointer is used by a call that any thread may make, and while it is cleared
        self._name = kind.removeprefix("hsr_").replace("engine", "model")  # users know a model that has an engine
        self._destroy = destroy
        self._finalizer = weakref.finalize(owner, _destroy_quietly, self.box, destroy, keep)

    @property
    def closed(self) -> bool:
        return bool(self.box[0] == ffi.NULL)

    @property
    def pointer(self) -> Any:
        """The native pointer; StateError after close()."""
        pointer = self.box[0]
        if pointer == ffi.NULL:
            raise errors.StateError(f"this {self._name} is closed")
        return pointer

    def close(self) -> None:
        """Destroy the object now; a second call does nothing. Raises BusyError while another thread is inside it."""
        with self.lock:
            call(self._destroy, self.box)
        self._finalizer.detach()


def _destroy_quietly(box: Any, destroy: Callable[[Any, Any], int], keep: object) -> None:
    destroy(box, ffi.NULL)  # refused only while a thread is inside: at exit, where the process frees everything


def refuse_copies(name: str, hint: str) -> Callable[..., Any]:
    """A __reduce_ex__ for objects that hold native memory: copying or pickling one would only copy an address."""

    def __reduce_ex__(self: object, protocol: object) -> Any:
        raise TypeError(f"a {name} holds native memory and cannot be copied or pickled; {hint}")

    return __reduce_ex__


# ---- the end of the process ----------------------------------------------------------------------------------------

_ending = threading.Event()
weakref.finalize(Handle, int).detach()  # so that the finalizers' turn is set, and comes after this
atexit.register(_ending.set)


def rest_at_exit() -> None:
    """At the end of the process only daemon threads are left, and their work is ended so that nothing computes in memory that goes.
    That is no failure to report: such a thread stands still, as Python's own do."""
    if _ending.is_set() and threading.current_thread() is not threading.main_thread():
        threading.Event().wait()


# ---- progress of long computations ---------------------------------------------------------------------------------

_watching = threading.local()


class _Watch:
    def __init__(self, report: Callable[[int, int], object] | None) -> None:
        self.report = report
        self.error: BaseException | None = None


def _stop_on_error(kind: object, error: BaseException, traceback: object) -> int:
    _watching.watch.error = error
    return 1


@ffi.def_extern(error=1, onerror=_stop_on_error)  # type: ignore[untyped-decorator]
def py_progress(user: Any, done: int, total: int) -> int:
    """Called between steps, on the thread that called the library. Running Python code here is what lets a signal handler
    raise: Ctrl-C becomes a KeyboardInterrupt in this function, the step loop ends, and `watched` raises it again."""
    report = _watching.watch.report
    if report is not None:
        report(done, total)
    return 0


@contextlib.contextmanager
def watched(report: Callable[[int, int], object] | None) -> Iterator[Any]:
    """Give the callback for hsr_session_prefill. An exception of `report`, or of a signal handler, is raised at the end."""
    outer = getattr(_watching, "watch", None)
    watch = _watching.watch = _Watch(report)
    try:
        yield lib.py_progress
    except errors.WorkCancelledError:
        if watch.error is None:
            raise
    finally:
        _watching.watch = outer
    if watch.error is not None:
        raise watch.error


# ---- log -----------------------------------------------------------------------------------------------------------

_LEVELS = (logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG)


@ffi.def_extern()  # type: ignore[untyped-decorator]
def py_log(user: Any, level: int, message: Any, length: int) -> None:
    """Hand one line of an engine's log to the logger that was given to `load`."""
    logger: logging.Logger = ffi.from_handle(user)
    logger.log(_LEVELS[min(max(level, 0), 3)], "%s", ffi.unpack(message, length).decode("utf-8", "replace"))
