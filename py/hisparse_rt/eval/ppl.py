# SPDX-License-Identifier: Apache-2.0
"""How far the predictions under a profile are from dense ones, on real text."""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import InvalidError
from ..model import Model
from ..profile import PRESETS, Profile
from ..session import Session
from .forced import Forced, Ids, Prompts, bytes_per_token, forced, text_ids
from .recall import Truth
from .statistics import Comparison, compare, summary

PARTS = ("decode", "prefill", "both")
"""What a profile computes: what follows a dense prompt; the prompt, which dense decoding follows; or all of it."""

Report = Callable[[int, int], object] | None


def perplexity(
    model: Model, texts: Mapping[str, str], profiles: Mapping[str, Profile], *, contexts: Sequence[int], tokens: int,
    truth: Truth | None = None, parts: Sequence[str] = ("decode",), against_kv: str = "auto", beyond_trained: bool = False,
    report: Report = None,
) -> dict[str, Any]:
    """Teacher-forced decoding of `tokens` tokens after prompts of each context, for each text, dense and under each profile.

    All profiles see the same tokens and are compared with the same dense run. truth: also tell how much attention was really read.
    parts: some of PARTS. against_kv: the key-value format of the dense run.
    """
    cases = {_named(name, part): (profile, part) for name, profile in profiles.items()
             for part in (parts if profile.mode == "sparse" else ("decode",))}
    for name, (profile, part) in cases.items():
        if part != "decode":
            _check_prefill(name, profile, min(contexts))
    runs: dict[str, list[Comparison]] = {name: [] for name in cases}
    facts: dict[str, list[tuple[float, ...]]] = {name: [] for name in cases}
    dense_facts: list[tuple[float, float]] = []
    done, total = 0, len(texts) * len(contexts) * (len(cases) + 1)
    for text_name, text in texts.items():
        for context in contexts:
            ids = text_ids(model, text, context + tokens + 1, text_name)
            decoding = [profile for profile, part in cases.values() if part == "decode"]
            with Prompts(model, ids[:context], tokens, decoding, beyond_trained=beyond_trained) as prompts:
                shown, following = ids[context:context + tokens], ids[context + 1:]
                with prompts.fork(PRESETS["exact"], against_kv) as session:
                    dense = forced(session, shown)
                dense_facts.append((_loss(dense.logprobs, following), dense.seconds / tokens))
                done = _told(report, done, total)
                for name, (profile, part) in cases.items():
                    decoding_by = PRESETS["exact"] if part == "prefill" else profile
                    with prompts.fork(profile, part=part) as session:
                        run, true = _run(session, shown, decoding_by, truth)
                        size = bytes_per_token(session, run.attended, decoding_by)
                    runs[name].append(compare(dense.logprobs, run.logprobs, following))
                    facts[name].append((run.covered, run.attended, size, run.seconds / tokens, _loss(run.logprobs, following), true))
                    done = _told(report, done, total)
    return {
        "texts": list(texts), "contexts": list(contexts), "tokens": tokens,
        "dense": {"perplexity": math.exp(np.mean([loss for loss, _ in dense_facts])), "seconds_per_token": _mean(dense_facts, 1),
                  "kv": against_kv},
        "profiles": {name: summary(runs[name]) | {
            "part": part, "perplexity": math.exp(_mean(facts[name], 4)), "covered_estimated": _mean(facts[name], 0),
            "covered_true": _mean(facts[name], 5),
            "attended_tokens": _mean(facts[name], 1), "bytes_read_per_token": _mean(facts[name], 2),
            "seconds_per_token": _mean(facts[name], 3),
        } for name, (_, part) in cases.items()},
    }


def _named(name: str, part: str) -> str:
    return name if part == "decode" else f"{name}, {part}"


def _check_prefill(name: str, profile: Profile, context: int) -> None:
    """InvalidError if the profile would compute the prompt as dense attention does, so that there is nothing to measure."""
    if not profile.prefill_budget:
        raise InvalidError(f"{name}: its prompts are always dense, prefill_budget is 0")
    dense = max(profile.prefill_dense_below, profile.dense_below)
    if context <= dense:
        raise InvalidError(f"{name}: its prompts are dense up to {dense} tokens (prefill_dense_below, dense_below), this one has {context}")


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
