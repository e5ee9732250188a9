# SPDX-License-Identifier: Apache-2.0
"""A file that gets its name when it is whole."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat

_OURS = re.compile(r"\.hisparse-[0-9a-f]{16}\.tmp")


class NewFile:
    """A temporary file beside `path`, which takes its place only in `commit`. Used as a context: leaving it without a commit, for
    whatever reason, removes it. A process that is killed cannot: whoever makes the next one in this folder does. Who lives holds a
    lock on his. Failures are plain OSErrors."""

    def __init__(self, path: str, mode: int = 0o666):
        self._path = path
        self._folder = os.path.dirname(path) or "."
        self._mode = mode
        self.descriptor = -1
        self.name: str | None = None
        """Of the temporary file; None when there is none."""

    def __enter__(self) -> NewFile:
        try:
            _remove_orphans(self._folder)
            while not self._create():
                pass
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.name is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.name)
            self.name = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def commit(self) -> None:
        """Make it durable and give it its name."""
        os.fsync(self.descriptor)
        os.rename(self.name, self._path)
        self.name = None
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _create(self) -> bool:
        """False if another process took it for an orphan before it was locked."""
        # Named before it exists: a signal that ends the program in between must find what to remove.
        name = self.name = os.path.join(self._folder, f".hisparse-{secrets.token_hex(8)}.tmp")
        try:
            self.descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self._mode)
        except OSError:
            self.name = None  # nobody's, or not ours
            raise
        with contextlib.suppress(OSError):  # a file system without locks: such files are never taken for orphans
            fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        if os.path.lexists(name):
            return True
        os.close(self.descriptor)
        self.descriptor, self.name = -1, None
        return False


def _remove_orphans(folder: str) -> None:
    """Temporary files that no process holds."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        orphans = [entry.path for entry in entries if _OURS.fullmatch(entry.name)]
        for name in orphans:
            with contextlib.suppress(OSError):
                _remove_orphan(name)


def _remove_orphan(name: str) -> None:
    descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _leads_to(name, descriptor):
                os.unlink(name)
    finally:
        os.close(descriptor)


def _leads_to(name: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(name), os.fstat(descriptor))
    except FileNotFoundError:
        return False
