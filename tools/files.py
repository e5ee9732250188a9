# SPDX-License-Identifier: Apache-2.0
"""Reading of source files. Plain positioned reads, never a mapping: a file cut short under us is then an error, not a signal."""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
from collections.abc import Callable

import numpy as np

from .errors import ConvertError, shown

_HASH_CHUNK = 4 << 20


def _open(path: str) -> io.FileIO:
    """A regular file: a pipe would wait for a writer, a device may have no end."""
    file = io.FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ConvertError(f"{shown(path)} is not a regular file")
    return file


class RangeFile:
    """A regular file that can be read at any offset."""

    def __init__(self, path: str):
        self.path = path
        self.shown = shown(path)
        try:
            self._file = _open(path)
            self.size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise ConvertError(f"cannot open {self.shown}: {error.strerror}") from error

    def read(self, offset: int, size: int) -> np.ndarray:
        """`size` bytes at `offset` as uint8."""
        if offset < 0 or size < 0 or offset + size > self.size:
            raise ConvertError(f"{self.shown}: bytes {offset} to {offset + size} lie outside the file of {self.size} bytes")
        data = np.empty(size, np.uint8)
        view, done = memoryview(data), 0
        while done < size:
            try:
                got = os.preadv(self._file.fileno(), [view[done:]], offset + done)
            except OSError as error:
                raise ConvertError(f"cannot read {self.shown}: {error.strerror}") from error
            if got == 0:
                raise ConvertError(f"{self.shown} became shorter while it was read")
            done += got
        return data

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for offset in range(0, self.size, _HASH_CHUNK):
            digest.update(self.read(offset, min(_HASH_CHUNK, self.size - offset)))
        return digest.hexdigest()

    def close(self) -> None:
        self._file.close()


def fingerprint(files: list[RangeFile]) -> str:
    """One file: the SHA-256 of its bytes. Several: the SHA-256 of the lines 'name, size, SHA-256' in order of name."""
    if len(files) == 1:
        return "sha256:" + files[0].sha256()
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda f: os.path.basename(f.path)):
        digest.update(os.fsencode(os.path.basename(file.path)) + f"\0{file.size}\0{file.sha256()}\n".encode())
    return "sha256:" + digest.hexdigest()


def read_text(path: str) -> str:
    try:
        with _open(path) as file:
            return file.readall().decode("utf-8")
    except OSError as error:
        raise ConvertError(f"cannot read {shown(path)}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConvertError(f"{shown(path)} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def read_json_object(path: str) -> dict:
    return parse_json_object(read_text(path), shown(path))


def parse_json_object(text: str, where: str, pairs_hook: Callable[[list], dict] | None = None) -> dict:
    try:
        value = json.loads(text, object_pairs_hook=pairs_hook)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # escapes can spell half characters, which no text can hold
    except UnicodeEncodeError as error:
        raise ConvertError(f"{where} is not valid JSON: it holds half a character") from error
    except (ValueError, RecursionError) as error:  # also numbers of more digits than Python takes
        raise ConvertError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConvertError(f"{where} is not a JSON object")
    return value
