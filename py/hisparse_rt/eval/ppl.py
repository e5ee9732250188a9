# SPDX-License-Identifier: Apache-2.0
"""How far the predictions under a profile are from dense ones, on real text."""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..model import Model
from ..profile import PRESETS, Profile
from ..session import Session
from .forced import Forced, Ids, Prompts, bytes_per_token, forced, text_ids
from .recall import Truth
from .statistics import Comparison, compare, summary

Report = Callable[[int, int], object] | None


def perplexity(
    model: Model, texts: Mapping[str, str], profiles: Mapping[str, Profile], *, contexts: Sequence[int], tokens: int,
    truth: Truth | None = None, beyond_trained: bool = False, report: Report = None,
) -> dict[str, Any]:
    """Teacher-forced decoding of `tokens` tokens after dense prompts of each context, for each text, dense and under each profile.

    All profiles see the same tokens and are compared with the same dense run. truth: also tell how much attention was really read.
    """
    runs: dict[str, list[Comparison]] = {name: [] for name in profiles}
    facts: dict[str, list[tuple[float, ...]]] = {name: [] for name in profiles}
    dense_facts: list[tuple[float, float]] = []
    done, total = 0, len(texts) * len(contexts) * (len(profiles) + 1)
    for text_name, text in texts.items():
        for context in contexts:
            ids = text_ids(model, text, context + tokens + 1, text_name)
            with Prompts(model, ids[:context], tokens, profiles.values(), beyond_trained=beyond_trained) as prompts:
                shown, following = ids[context:context + tokens], ids[context + 1:]
                with prompts.fork(PRESETS["exact"], "auto") as session:
                    dense = forced(session, shown)
                dense_facts.append((_loss(dense.logprobs, following), dense.seconds / tokens))
                done = _told(report, done, total)
                for name, profile in profiles.items():
                    with prompts.fork(profile) as session:
                        run, true = _run(session, shown, profile, truth)
                        size = bytes_per_token(session, run)
                    runs[name].append(compare(dense.logprobs, run.logprobs, following))
                    facts[name].append((run.covered, run.attended, size, run.seconds / tokens, _loss(run.logprobs, following), true))
                    done = _told(report, done, total)
    return {
        "texts": list(texts), "contexts": list(contexts), "tokens": tokens,
        "dense": {"perplexity": math.exp(np.mean([loss for loss, _ in dense_facts])), "seconds_per_token": _mean(dense_facts, 1)},
        "profiles": {name: summary(runs[name]) | {
            "perplexity": math.exp(_mean(facts[name], 4)), "covered_estimated": _mean(facts[name], 0),
            "covered_true": _mean(facts[name], 5),
            "attended_tokens": _mean(facts[name], 1), "bytes_read_per_token": _mean(facts[name], 2),
            "seconds_per_token": _mean(facts[name], 3),
        } for name in profiles},
    }


def _run(session: Session, ids: Ids, profile: Profile, truth: Truth | None) -> tuple[Forced, float]:
    """A run, and the share of the true attention that it read; NaN if nobody asked."""
    if truth is None or profile.mode == "dense":
        return forced(session, ids), 1.0 if profile.mode == "dense" else math.nan
    first, stride = session.n_tokens, max(1, len(ids) // truth.queries)
    with session.capture(len(ids) // stride, first=first, stride=stride, slices=-(-(first + len(ids)) // 16)) as captured:
        run = forced(session, ids)
    return run, truth.covered(session, captured, first, stride, profile)


def _loss(logprobs: np.ndarray[Any, Any], following: np.ndarray[Any, Any]) -> float:
    return float(-logprobs[np.arange(len(following)), following].mean())


def _mean(rows: Sequence[tuple[float, ...]], column: int) -> float:
    return float(np.mean([row[column] for row in rows]))


def _told(report: Report, done: int, total: int) -> int:
    if report is not None:
        report(done + 1, total)
    return done + 1
