# SPDX-License-Identifier: Apache-2.0
"""Text from prompts, one or many."""
from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack, overload

import numpy as np
import numpy.typing as npt

from .checks import integer
from .errors import ContextError, HisparseError, InvalidError, NoSpaceError
from .ids import Ids, as_ids
from .prompt_cache import Path, cached_session
from .request import RequestOptions, Sampling, SamplingOptions, sampling_of
from .result import Result
from .session import finished
from .stream import Stream

if TYPE_CHECKING:
    from .model import Model

_INT32_MAX = (1 << 31) - 1
Progress: TypeAlias = Callable[[int, int], object]


# Type checkers see a str as a sequence of str, so the order of these matters: one prompt first, lists of prompts last.
@overload
def generate(model: Model, prompt: str | Ids, *, stream: Literal[True], **options: Unpack[RequestOptions]) -> Stream: ...
@overload
def generate(  # type: ignore[overload-overlap]
    model: Model, prompt: str | Ids, *, return_details: Literal[True], **options: Unpack[RequestOptions]
) -> Result: ...
@overload
def generate(model: Model, prompt: str | Ids, **options: Unpack[RequestOptions]) -> str: ...  # type: ignore[overload-overlap]
@overload
def generate(
    model: Model, prompt: Sequence[str | Ids], *, return_details: bool = ..., return_exceptions: bool = ...,
    seed: int | Sequence[int] | None = ..., **options: Any,
) -> list[Any]: ...


def generate(
    model: Model, prompt: Any, *, stream: bool = False, return_details: bool = False, return_exceptions: bool = False,
    context: int | None = None, kv: str | None = None, beyond_trained: bool = False, progress: Progress | None = None,
    prompt_cache: Path | None = None, seed: int | Sequence[int] | None = None, **options: Any,
) -> Any:
    """Continue a prompt, or each of a list of prompts computed together.

    prompt             text, token ids (taken as they are, no begin token added), or a list of either
    stream             True: return a `Stream`, an iterator of pieces of text. For one prompt
    return_details     True: return a `Result` (tokens, finish reason, log-probabilities, times) in place of the text
    return_exceptions  in a list: put the exception of a prompt that fails in its place; the others go on. Without it the first
                       one is raised, and prompts are all checked before anything is computed
    context            session length in tokens; None takes prompt + max_tokens, at most the trained length
    kv, beyond_trained see `Model.session`
    progress           called with (tokens done, tokens to do) while a long prompt is computed
    prompt_cache       a file that keeps the computed prompt. A later prompt computes only what follows the beginning they share, and the
                       file then holds the later one. For one prompt; see `Session.save` for what the file holds
    seed               one for all prompts, or a list with one for each
    other options      see `Sampling`; greedy unless a temperature is given

    Text is a plain continuation: nothing is added but the tokenizer's begin token, and control tokens spelled in it are
    recognised. For messages of users, `Model.chat` is the right call.

    ValueError for an empty prompt (unless the tokenizer adds a begin token), ContextError, TokenError, NoSpaceError; see errors.
    """
    session_options = {"context": context, "kv": kv, "beyond_trained": beyond_trained}
    if _is_single(prompt):
        running = start(model, prompt, progress=progress, seed=seed, prompt_cache=prompt_cache,
                        **session_options, **options)  # type: ignore[arg-type]
        return finished(running, stream, return_details)
    if stream:
        raise InvalidError("stream=True takes one prompt, not a list")
    if prompt_cache is not None:
        raise InvalidError("prompt_cache takes one prompt, not a list")
    prompts = list(prompt)
    seeds = _seeds(seed, len(prompts))
    batch = _Batch(model, prompts, [sampling_of({"seed": seeds[i], **options}) for i in range(len(prompts))], session_options, progress)
    results = batch.run(return_exceptions)
    return results if return_details else [item.text if isinstance(item, Result) else item for item in results]


def start(
    model: Model, prompt: str | Ids, *, context: int | None = None, kv: str | None = None, beyond_trained: bool = False,
    progress: Progress | None = None, prompt_cache: Path | None = None, **options: Unpack[SamplingOptions],
) -> Stream:
    """A `Stream` over a session of its own."""
    sampling = sampling_of(options)
    session_options = {"context": context, "kv": kv, "beyond_trained": beyond_trained}
    return _start(model, prompt_ids(model, prompt), sampling, session_options, progress, prompt_cache)


def prompt_ids(model: Model, prompt: str | Ids) -> npt.NDArray[np.int32]:
    """Ids of a prompt; ValueError if there are none."""
    ids = model.encode(prompt) if isinstance(prompt, str) else as_ids(prompt)
    if not ids.size:
        raise InvalidError("an empty prompt: there is nothing to continue, and the tokenizer adds no begin token"
                           if isinstance(prompt, str) else "an empty prompt: no token ids")
    return ids


def _start(
    model: Model, ids: npt.NDArray[np.int32], sampling: Sampling, session_options: dict[str, Any], progress: Progress | None,
    prompt_cache: Path | None = None,
) -> Stream:
    length = _check_context(model, len(ids), sampling, session_options)
    options = {**session_options, "context": length}
    if prompt_cache is None:
        session = model.session(**options)
    else:
        session = cached_session(model, ids, prompt_cache, options, session_options["context"] is not None, progress)
    try:
        if prompt_cache is None:
            session._append(ids)
        return Stream(session, sampling, model._detokenizer(), owns_session=True, report=progress)
    except BaseException:
        session.close()
        raise


def _check_context(model: Model, n: int, sampling: Sampling, session_options: dict[str, Any]) -> int:
    """The session length: no longer than needed, since some rotary tables depend on it."""
    trained = model.info.context_length
    length: int | None = session_options["context"]
    if length is not None:
        length = integer("context", length, 1, _INT32_MAX)
    else:
        length = n + max(sampling.max_tokens, 0)
        if not session_options["beyond_trained"]:
            length = min(length, trained)
    if n > length or (n == length and sampling.max_tokens > 0):
        hint = f" (the model was trained for {trained}; beyond_trained allows more)" if session_options["context"] is None else ""
        raise ContextError(f"the prompt has {n} tokens, which leaves no room in a context of {length}{hint}")
    return min(length, _INT32_MAX)


def _is_single(prompt: Any) -> bool:
    if isinstance(prompt, (str, bytes)) or prompt is None:
        return True
    if hasattr(prompt, "__array__"):
        return np.asarray(prompt).ndim < 2
    if not isinstance(prompt, Sequence):
        raise TypeError(f"a prompt is text, token ids, or a list of either, not {type(prompt).__name__}")
    return not prompt or not (isinstance(prompt[0], (str, Sequence)) or np.ndim(prompt[0]) > 0)


def _seeds(seed: Any, n: int) -> list[int | None]:
    if seed is None or not np.ndim(seed):
        return [seed] * n
    seeds = list(seed)
    if len(seeds) != n:
        raise InvalidError(f"{len(seeds)} seeds for {n} prompts")
    return seeds


class _Batch:
    """Many prompts in one engine. As many run together as fit; the others follow when memory comes back."""

    def __init__(self, model: Model, prompts: list[Any], samplings: list[Sampling], session_options: dict[str, Any],
                 progress: Progress | None) -> None:
        self._model = model
        self._prompts = prompts
        self._samplings = samplings
        self._options = session_options
        self._progress = progress
        self._ids: dict[int, npt.NDArray[np.int32]] = {}
        self._results: dict[int, Result | HisparseError | ValueError | TypeError] = {}
        self._running: dict[int, Stream] = {}

    def run(self, return_exceptions: bool) -> list[Any]:
        try:
            self._check_all(return_exceptions)
            self._compute(return_exceptions)
        finally:
            for running in self._running.values():
                running.close()
        return [self._results[i] for i in range(len(self._prompts))]

    def _check_all(self, return_exceptions: bool) -> None:
        for i, prompt in enumerate(self._prompts):
            try:
                self._ids[i] = prompt_ids(self._model, prompt)
                _check_context(self._model, len(self._ids[i]), self._samplings[i], self._options)
            except (HisparseError, ValueError, TypeError) as error:
                self._ids.pop(i, None)
                self._fail(i, error, return_exceptions)

    def _fail(self, i: int, error: Any, return_exceptions: bool) -> None:
        if not return_exceptions:
            error.add_note(f"in prompt {i} of the list")
            raise error
        self._results[i] = error

    def _compute(self, return_exceptions: bool) -> None:
        waiting = collections.deque(self._ids)
        while waiting or self._running:
            while waiting and self._admit(waiting[0], return_exceptions):
                waiting.popleft()
            for i, running in list(self._running.items()):
                try:
                    running.step()
                except HisparseError as error:
                    del self._running[i]
                    self._fail(i, error, return_exceptions)
                    continue
                if running.finish_reason is not None:
                    self._results[i] = running.result
                    del self._running[i]

    def _admit(self, i: int, return_exceptions: bool) -> bool:
        """Start prompt i; False if it has to wait for memory that a running one holds."""
        try:
            self._running[i] = _start(self._model, self._ids[i], self._samplings[i], self._options, self._progress)
        except NoSpaceError as error:
            if self._running:
                return False
            self._fail(i, error, return_exceptions)
        except HisparseError as error:
            self._fail(i, error, return_exceptions)
        return True
