# SPDX-License-Identifier: Apache-2.0
"""What is to be measured: the prompts of one depth, and the options they run with."""
from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checks import text_content
from ..errors import HisparseError, InvalidError
from ..model import Model

# Enough to load code and weights and to let a program settle on its kernels; more would only take time at great depths.
_WARM_UP_TOKENS = 2048
COMPUTED_TOKENS = 8192
"""Tokens that are really computed where the rest of a context is sampled from them."""


@dataclass(frozen=True)
class Options:
    """What every measurement has in common. Options for `load`, `Model.session` and `Session.generate` reach only our own."""

    decode_tokens: int
    threads: int
    engine: dict[str, Any] = field(default_factory=dict)
    session: dict[str, Any] = field(default_factory=dict)
    generate: dict[str, Any] = field(default_factory=dict)
    fill: bool = False
    """Only the start of a context is computed, the rest is sampled from it: Session.fill."""
    save: str | None = None
    """Where the session is written to before it decodes."""
    restore: str | None = None
    """A file of Session.save to begin with, in place of a prompt."""


@dataclass(frozen=True)
class Point:
    """One place of the report: a depth, and how many sessions of it decode together."""

    depth: int
    batch: int = 1

    def __str__(self) -> str:
        return f"{self.depth} tokens" if self.batch == 1 else f"{self.batch} x {self.depth} tokens"


def make(model: str, ids: npt.NDArray[np.int32], point: Point, options: Options) -> dict[str, Any]:
    """The job for a measuring process. No prompt begins like another or like the warm-up: some programs keep what they computed."""
    n_warm_up = min(point.depth, _WARM_UP_TOKENS)
    n_computed = 0 if options.restore else min(point.depth, COMPUTED_TOKENS) if options.fill else point.depth
    rotations = [np.roll(ids, -i * (len(ids) // (point.batch + 1))).tolist() for i in range(point.batch + 1)]
    return {
        "model": model, "prompts": [ids_[:n_computed] for ids_ in rotations[:-1]], "warm_up": rotations[-1][:n_warm_up],
        "fill": 0 if options.restore else point.depth - n_computed, "restore": options.restore, "save": options.save,
        "depth": point.depth, "decode_tokens": options.decode_tokens, "threads": options.threads,
        "engine": options.engine, "session": options.session, "generate": options.generate,
    }


@dataclass(frozen=True)
class Turns:
    """Sessions of all depths, open at once, under all profiles: how often each decodes `Options.decode_tokens`."""

    rounds: int
    profiles: list[str]
    batches: list[int]


def make_turns(model: str, ids: npt.NDArray[np.int32], depths: list[int], restored: int | None, turns: Turns,
               options: Options) -> dict[str, Any]:
    """The job for a process that measures all of them. restored: tokens in the file options.restore."""
    batch, computed = max(turns.batches), replace(options, restore=None)
    places = [make(model, ids, Point(depth, batch), computed) for depth in depths]
    if restored is not None:
        places.append(make(model, ids, Point(restored, batch), options))
    places.sort(key=lambda place: int(place["depth"]))
    turns_ = {"rounds": turns.rounds, "profiles": turns.profiles, "batches": turns.batches}
    return places[-1] | {"prompts": [], "turns": turns_, "places": places}


def prompt(model: Model, n: int, name: str | None) -> npt.NDArray[np.int32]:
    """n ids of real text: speed must not profit from a prompt no model would see."""
    text = text_content(name) if name is not None else _library_text(n)
    try:
        ids = model.encode(text)
    except HisparseError as error:
        raise InvalidError(f"bench needs the model's tokenizer: {error}") from error
    if not ids.size:
        raise InvalidError(f"{name}: the text is empty")
    return np.resize(ids, n)


def _library_text(n: int) -> str:
    folder, text = Path(argparse.__file__).parent, ""
    for path in sorted(folder.glob("*.py")):
        text += path.read_text("utf-8", "replace")
        if len(text) > 8 * n:  # a token is rarely longer
            break
    return text
