# SPDX-License-Identifier: Apache-2.0
"""How to sample: the options of one request."""
from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

import numpy as np

from ._library import ffi, lib
from .checks import integer, real
from .errors import InvalidError
from .ids import as_ids

_INT32 = np.iinfo(np.int32)


class SamplingOptions(TypedDict, total=False):
    """The keyword options that every generate and chat call takes; `Sampling` explains them."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_window: int
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str]
    stop_tokens: Sequence[int]
    ignore_eos: bool
    logprobs: int | None


class RequestOptions(SamplingOptions, total=False):
    """What calls that make a session of their own take besides; `generate` explains them."""

    context: int | None
    kv: str | None
    beyond_trained: bool
    progress: Callable[[int, int], object] | None
    prompt_cache: str | bytes | os.PathLike[Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Options of one request. The defaults are greedy: the same words every time, whatever the checkpoint recommends
    (its own recommendation is `Model.generation_defaults`). Ranges are checked before anything is computed.
    """

    max_tokens: int = 128
    """Tokens to sample at most; 0 computes the prompt only."""
    temperature: float = 0.0
    """Divides the logits; 0 takes the most likely token, the lowest id on ties."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 is off."""
    top_p: float = 1.0
    """Keep the most likely tokens that hold this share of the probability, in (0, 1]; 1 is off."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one, in [0, 1]; 0 is off."""
    repetition_penalty: float = 1.0
    """Weakens tokens seen in the last penalty_window tokens, prompt included: positive logits are divided by it, negative ones
    multiplied, once per token; 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token of the output, once."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of each token of the output, once per occurrence."""
    penalty_window: int = -1
    """How many tokens back repetition_penalty looks; -1 is all."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits, by token id; -inf bans a token."""
    seed: int | None = None
    """0 to 2**64 - 1: the same seed draws the same tokens, whatever runs beside it. None takes a new one, reported in the result."""
    stop: str | Sequence[str] = ()
    """Texts that end the output. They are not part of it."""
    stop_tokens: Sequence[int] = ()
    """Token ids that end the output, besides the model's own; at most 32."""
    ignore_eos: bool = False
    """Do not stop at the model's own end tokens."""
    logprobs: int | None = None
    """Report log-probabilities of each token, and of this many most likely ones (0 to 20); None is off."""

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for field in fields(self):
            if field.type == "int":
                put(field.name, integer(field.name, getattr(self, field.name), -1 if field.name == "penalty_window" else 0, _INT32.max))
            elif field.type == "float":
                put(field.name, real(field.name, getattr(self, field.name)))
            elif field.type == "bool" and not isinstance(getattr(self, field.name), (bool, np.bool_)):
                raise TypeError(f"{field.name} must be True or False, not {getattr(self, field.name)!r}")
        if self.seed is not None:
            put("seed", integer("seed", self.seed, 0, (1 << 64) - 1))
        if self.logprobs is not None:
            put("logprobs", integer("logprobs", self.logprobs, 0, 20))
        stops = _texts(self.stop)
        if any("\ud800" <= character <= "\udfff" for stop in stops for character in stop):
            raise InvalidError("stop has half a character in it, which no output can contain")
        if "" in stops:
            raise InvalidError("stop has an empty text, which would end every output at once")
        put("stop", stops)
        put("stop_tokens", tuple(as_ids(() if self.stop_tokens is None else self.stop_tokens).tolist()))
        put("logit_bias", _biases(self.logit_bias))

    def native(self, seed: int) -> tuple[Any, tuple[Any, ...]]:
        """An hsr_request, and what must live as long as it."""
        request = ffi.new("hsr_request *")
        lib.hsr_request_init(request, ffi.sizeof("hsr_request"))
        for name in _COPIED:
            setattr(request, name, getattr(self, name))
        request.seed = seed
        request.n_logprobs = self.logprobs or 0
        stop = ffi.new("int32_t[]", list(self.stop_tokens))
        request.stop, request.n_stop = stop, len(self.stop_tokens)
        bias = ffi.new("hsr_token_bias[]", list((self.logit_bias or {}).items()))
        request.bias, request.n_bias = bias, len(bias)
        return request, (stop, bias)

    def draw_seed(self) -> int:
        """The seed, or a new one."""
        return secrets.randbits(64) if self.seed is None else self.seed


def sampling_of(options: Mapping[str, Any]) -> Sampling:
    """The `Sampling` of keyword arguments; TypeError for one that it does not have, with those that it has."""
    known = [field.name for field in fields(Sampling)]
    for name in options:
        if name not in known:
            raise TypeError(f"there is no option {name!r}; the options of sampling are {', '.join(known)}")
    return Sampling(**options)


_COPIED = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
           "penalty_window", "ignore_eos")


def _texts(value: str | Iterable[str] | None) -> tuple[str, ...]:
    texts: Any = () if value is None else (value,) if isinstance(value, str) else value
    if isinstance(texts, Iterable):
        texts = tuple(texts)
        if all(isinstance(text, str) for text in texts):
            return texts
    raise TypeError("stop must be a text or texts; token ids go to stop_tokens")


def _biases(value: Mapping[int, float] | Iterable[tuple[int, float]] | None) -> dict[int, float] | None:
    if value is None:
        return None
    try:
        biases = dict(value)
    except (TypeError, ValueError):
        raise TypeError(f"logit_bias must map token ids to numbers, not be {value!r}") from None
    return {
        integer("a token of logit_bias", token, _INT32.min, _INT32.max): real(f"logit_bias[{token}]", bias)
        for token, bias in biases.items()
    }
