# SPDX-License-Identifier: Apache-2.0
"""What a request gave."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithms of probabilities, before penalties, bias, temperature and filters."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most likely tokens and theirs, best first; as many as were asked for."""


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request."""

    text: str
    """Without the end token and without the stop string."""
    tokens: tuple[int, ...]
    """Every sampled id, the one that ended the output included."""
    finish_reason: str
    """"stop" (end token, stop token, or stop string) or "length" (max_tokens, or the context is full)."""
    stop: str | None
    """The stop string that ended the output."""
    logprobs: tuple[TokenLogprob, ...] | None
    """One entry per token, if they were asked for."""
    seed: int
    prompt_tokens: int
    """Tokens the session held before the request."""
    prefill_tokens: int
    """Those of them that were computed for it."""
    prefill_seconds: float
    """From the start of computing to the first token."""
    decode_seconds: float
    """From the first token to the last."""
    kv_bytes: int
    """Key and value memory the session held at the end."""
