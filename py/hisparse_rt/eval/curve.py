# SPDX-License-Identifier: Apache-2.0
"""Quality against cost over budgets and selectors: what a user picks settings from."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..model import Model
from ..profile import Profile
from .ppl import perplexity

CALIBRATED = ("sketch", "cluster")


def curve(
    model: Model, texts: Mapping[str, str], base: Profile, *, selectors: Sequence[str], budgets: Sequence[int], contexts: Sequence[int],
    tokens: int, beyond_trained: bool = False, report: Callable[[int, int], object] | None = None,
) -> dict[str, Any]:
    """`perplexity` for every selector at every budget, the other settings as in `base`."""
    profiles = {f"{selector} {budget}": replace(base, mode="sparse", selector=selector, budget=budget)
                for selector in selectors for budget in budgets}
    result = perplexity(model, texts, profiles, contexts=contexts, tokens=tokens, beyond_trained=beyond_trained, report=report)
    points = [{"selector": profiles[name].selector, "budget": profiles[name].budget} | measured
              for name, measured in result.pop("profiles").items()]
    return result | {"points": points}
