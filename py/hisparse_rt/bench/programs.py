# SPDX-License-Identifier: Apache-2.0
"""The programs that are compared. Each measurement runs in a process of its own, so that they share neither memory nor caches."""
from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import FileMissingError, HisparseError, InvalidError, from_os_error

OURS = "ours"
_SCRIPTS = {"llama.cpp": "llama_cpp_peer.py", "openvino": "openvino_peer.py"}
PEERS = tuple(_SCRIPTS)
_PACKAGES = {"llama.cpp": "llama-cpp-python", "openvino": "openvino-genai"}
_PROBE_SECONDS = 120


class MeasureError(HisparseError):
    """A measuring process gave no result; the text says why, in one line."""


class LimitError(MeasureError):
    """It took longer than allowed, and was stopped."""


@dataclass(frozen=True)
class Program:
    name: str
    command: list[str]
    model: str
    facts: dict[str, Any] = field(default_factory=dict)
    """Version and key-value type."""
    foreign: bool = False
    """Another interpreter, to which this one's search path means nothing."""

    def probe(self) -> dict[str, Any]:
        """What is installed; {"missing": why} if the program is not."""
        return self._run(["probe"], "", _PROBE_SECONDS)

    def measure(self, job: dict[str, Any], seconds: float | None) -> dict[str, Any]:
        """Measure in a new process. MeasureError; LimitError after `seconds`."""
        with _screen() as screen:
            return self._run([], json.dumps(job | {"screen": screen}), seconds, screen)

    def _run(self, arguments: list[str], text: str, seconds: float | None, screen: int | None = None) -> dict[str, Any]:
        hidden = ("PYTHONPATH", "PYTHONHOME") if self.foreign else ()
        environment = {key: value for key, value in os.environ.items() if key not in hidden}
        try:
            # In a session of its own, so that it can be ended with everything it may have started.
            process = subprocess.Popen([*self.command, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                       text=True, errors="replace", env=environment, start_new_session=True,
                                       pass_fds=() if screen is None else (screen,))
        except OSError as error:
            raise from_os_error(f"cannot run {self.command[0]}", error) from error
        with process:
            try:
                out, err = process.communicate(text, seconds)
            except subprocess.TimeoutExpired:
                raise LimitError(f"took more than {seconds:.0f} s") from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        try:
            answer = json.loads(out)
            if process.returncode == 0 and isinstance(answer, dict):
                return answer
        except ValueError:
            pass
        raise MeasureError(_reason(process.returncode, err))


@contextlib.contextmanager
def _screen() -> Iterator[int | None]:
    """The terminal of stderr, if it is one, for a process whose own stderr is kept."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    screen = os.dup(sys.stderr.fileno())
    try:
        yield screen
    finally:
        os.close(screen)


def _reason(code: int, said: str) -> str:
    """Why a process failed: the end of what it said, which for Python is the exception."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    end = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{lines[-1][:300]} ({end})" if lines else end


def ours(model: str) -> Program:
    program = Program(OURS, [sys.executable, "-P", "-m", f"{__package__}.ours"], model)
    return Program(program.name, program.command, model, program.probe())


def peer(name: str, model: str, python: str | None) -> Program:
    """python: an interpreter that has the peer; None is this one. MeasureError, with the reason, if it has not."""
    command = [python or sys.executable, str(Path(__file__).parent / "peers" / _SCRIPTS[name])]
    program = Program(name, command, model, foreign=python is not None)
    facts = program.probe()
    if "missing" in facts:
        raise MeasureError(f"{_PACKAGES[name]} is not installed for {command[0]} ({facts['missing']})")
    return Program(name, command, model, facts, program.foreign)


def model_facts(path: str) -> dict[str, Any]:
    """Which weights the peers had: speeds compare only as far as the bits do."""
    from ..tools.errors import ConvertError
    from ..tools.files import RangeFile
    from ..tools.gguf_header import read_header

    types: Counter[str] = Counter()
    try:
        file = RangeFile(path)
        try:
            for tensor in read_header(file).tensors.values():
                types[tensor.type.name] += tensor.size
        finally:
            file.close()
    except ConvertError:
        pass  # peers may know formats that our converter does not
    return {"path": path, "types": dict(types)}


def check_python(python: str) -> None:
    """FileMissingError if this interpreter is not there."""
    if shutil.which(python) is None:
        raise FileMissingError(f"cannot run {python}: no such program", sys_code=2)


def check_names(names: list[str]) -> None:
    for name in names:
        if name not in _SCRIPTS:
            raise InvalidError(f"{name!r} is no peer; known are {', '.join(PEERS)}")
    if len(set(names)) < len(names):
        raise InvalidError("a peer is named twice")
