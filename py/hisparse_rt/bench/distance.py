# SPDX-License-Identifier: Apache-2.0
"""How far a profile is from dense attention, to stand beside its speed: KL of decoded tokens after a dense prompt, as `eval ppl` has it."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..checks import text_content
from ..errors import InvalidError
from ..eval.forced import library_text
from ..eval.ppl import perplexity
from ..model import Model
from ..profile import Profile

CONTEXT = 24576
"""Tokens of the prompt, where the model was trained for so many."""
TOKENS = 64
_LEAST = 512


def measure(model: Model, profiles: Mapping[str, Profile], name: str | None,
            shown: Callable[[int, int], object] | None = None) -> dict[str, Any]:
    """Of the sparse ones among the profiles: {"context", "tokens", "profiles": {name: {"mean", "interval"}}}. name: of a text."""
    sparse = {label: profile for label, profile in profiles.items() if profile.mode == "sparse"}
    if not sparse:
        raise InvalidError("--kl is of sparse profiles, and all are dense")
    context = min(CONTEXT, model.info.context_length - TOKENS)
    text = library_text(8 * context) if name is None else text_content(name)
    context = min(context, len(model.encode(text)) - TOKENS - 1)
    if context < _LEAST:
        raise InvalidError(f"--kl compares after a prompt of at least {_LEAST} tokens, and model and text allow {max(context, 0)}")
    found = perplexity(model, {"text": text}, sparse, contexts=[context], tokens=TOKENS, report=shown)
    return {"context": context, "tokens": TOKENS, "profiles": {
        label: {"mean": row["kl_mean"], "interval": row["kl_interval"]} for label, row in found["profiles"].items()}}


def beside(rows: list[dict[str, Any]], found: dict[str, Any] | None, profile: str | None = None) -> None:
    """Give rows of decoding the KL of their profile, which is `profile` where they name none. None: dense, or nobody asked."""
    known = found["profiles"] if found else {}
    for row in rows:
        of_profile = known.get(row.get("profile", profile)) if row["work"] == "decode" else None
        row["kl"] = of_profile["mean"] if of_profile else None


def columns(cells: list[list[str]], rows: list[dict[str, Any]]) -> list[list[str]]:
    """A table's cells, heads first, with one more column if any row has a KL."""
    if all(row.get("kl") is None for row in rows):
        return cells
    last = ["KL", *("-" if row["kl"] is None else f"{row['kl']:.4f}" for row in rows)]
    return [[*line, cell] for line, cell in zip(cells, last, strict=True)]
