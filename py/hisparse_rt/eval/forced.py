# SPDX-License-Identifier: Apache-2.0
"""Teacher-forced decoding: the same tokens, one at a time, after the same dense prompt, under one profile after another."""
from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import ContextError, InvalidError
from ..ids import as_ids
from ..model import Model
from ..profile import PRESETS, Profile
from ..profile_index import format_of, index_of, keeps_history
from ..session import Session, SessionStats
from .index_bytes import far_tokens, index_read
from .statistics import log_softmax

Ids = npt.NDArray[np.int32]
_PLAIN_BYTES = {"f32": 4, "bf16": 2}
_CODE_BYTES = {"int8": 1.13, "compact": 0.5, "vtq": 0.56}  # of a value, scales and means included


@dataclass(frozen=True)
class Forced:
    """What one run gave."""

    logprobs: npt.NDArray[np.float64]
    """[tokens, vocabulary]: of what follows each token."""
    covered: float
    """Estimated share of the attention that was read, mean over tokens; NaN for a dense run."""
    attended: float
    """Tokens read per query and key-value head."""
    seconds: float


class Prompts:
    """Sessions that hold the prompt: one for each key-value format, index, history and way to compute it that profiles ask for,
    made when needed.

    profiles: those that will be asked for; dense attention, which needs no index, then shares the session of the first.
    """

    def __init__(self, model: Model, ids: Ids, room: int, profiles: Iterable[Profile] = (), *, beyond_trained: bool = False) -> None:
        self._dense_index = next((index_of(profile, model.calibrated) for profile in profiles if profile.mode == "sparse"), "none")
        self.model, self.ids, self.room, self.beyond = model, ids, room, beyond_trained
        check_length(model, len(ids) + room, beyond_trained)
        self._sessions: dict[tuple[object, ...], Session] = {}

    @contextlib.contextmanager
    def fork(self, profile: Profile, kv: str | None = None, part: str = "decode") -> Iterator[Session]:
        """A session behind the prompt, of which `profile` computes a part: what follows (decode), the prompt (prefill), or both.
        The rest is dense."""
        own = profile.session_options()
        index = index_of(profile, self.model.calibrated) if profile.mode == "sparse" else self._dense_index
        prompt = profile if part != "decode" else self._dense(profile)
        held = format_of(kv or self.model.kv, profile, self.model.calibrated, self.model.info.dtype)
        key = (held, index, keeps_history(profile), prompt if part != "decode" else None, *sorted(own.items()))
        if key not in self._sessions:
            session = self.model.session(context=len(self.ids) + self.room, kv=key[0], index=index, profile=prompt,
                                         beyond_trained=self.beyond, **own)
            session.append(self.ids)
            session.prefill()
            self._sessions[key] = session
        fork = self._sessions[key].fork()
        try:
            fork.set_profile(PRESETS["exact"] if part == "prefill" else profile)
            yield fork
        finally:
            fork.close()

    def _dense(self, profile: Profile) -> Profile | int:
        """What computes the prompt densely and still keeps the history that `profile` reads."""
        return replace(profile, dense_below=len(self.ids), prefill_budget=0) if keeps_history(profile) else 0

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()

    def __enter__(self) -> Prompts:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def forced(session: Session, ids: Ids) -> Forced:
    """Feed `ids` to a session one at a time, as decoding would."""
    rows = np.empty((len(ids), session.model.info.vocab_size), np.float32)
    before, began = session.stats(), time.perf_counter()
    for row, token in enumerate(ids):
        rows[row] = session.logits([int(token)])[0]
    seconds = time.perf_counter() - began
    stats = session.stats()
    rows[:, session.model.info.tokenizer_size:] = -np.inf  # padding ids are never sampled
    attended = stats.attended_tokens if stats.sparse_rows > before.sparse_rows else float(stats.n_computed)
    return Forced(log_softmax(rows), _covered(before, stats), attended, seconds)


def _covered(before: SessionStats, after: SessionStats) -> float:
    """What rows between the two believe to have read."""
    rows = after.sparse_rows - before.sparse_rows
    earlier = before.covered_mean * before.sparse_rows if before.sparse_rows else 0.0
    return (after.covered_mean * after.sparse_rows - earlier) / rows if rows else math.nan


def bytes_per_token(session: Session, attended: float, profile: Profile) -> float:
    """Key, value and index bytes that one decoded token reads, about: what it attends, and what its selector looks at."""
    info, stats, profile = session.model.info, session.stats(), session.model.for_layers(profile)
    each = _PLAIN_BYTES.get(stats.kv_format) or _CODE_BYTES.get(stats.kv_format, 2)
    looked_at = far_tokens(profile, stats) if profile.mode == "sparse" and profile.selector == "oracle" else 0   # of keys
    key_values = (2 * attended + looked_at) * each * info.head_dim * info.n_layers * info.n_kv_heads
    return key_values + index_read(profile, info, stats, session.model.calibrated)


def check_length(model: Model, tokens: int, beyond_trained: bool) -> None:
    """ContextError for a length that the model was not trained for."""
    if tokens > model.info.context_length and not beyond_trained:
        raise ContextError(f"{tokens} tokens pass the {model.info.context_length} the model was trained for; beyond_trained allows it")


def library_text(characters: int) -> str:
    """So much of Python's own standard library, or a little more."""
    text = ""
    for path in sorted(Path(os.__file__).parent.glob("*.py"), reverse=True):  # from the other end than calibration's default
        text += path.read_text("utf-8", "replace")
        if len(text) >= characters:
            break
    return text


def text_ids(model: Model, text: str, n: int, name: str) -> Ids:
    """The first n ids of a text; InvalidError if it is shorter."""
    ids = as_ids(model.encode(text))
    if len(ids) < n:
        raise InvalidError(f"{name} has {len(ids)} tokens, and {n} are needed")
    return ids[:n]
