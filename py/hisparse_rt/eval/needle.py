# SPDX-License-Identifier: Apache-2.0
"""Facts hidden in a long text, asked for at its end: does sparse attention still find what dense attention finds?"""
from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InvalidError
from ..ids import as_ids
from ..model import Model
from ..profile import PRESETS, Profile
from ..session import Session
from .forced import Ids, Prompts, forced, text_ids

KINDS = ("single", "several", "multi-hop")
ROOM = 128  # tokens for a question and its answer
_NAMES = ("Alice", "Bruno", "Clara", "David", "Elena", "Felix", "Greta", "Henry", "Irene", "Jonas", "Karen", "Louis")
_CITIES = ("Paris", "Tokyo", "Cairo", "Lima", "Oslo", "Delhi", "Rome", "Quito", "Dublin", "Vienna", "Berlin", "Madrid")


@dataclass(frozen=True)
class Needle:
    """Sentences to hide, at depths from 0 (the beginning) to 1, and what is asked at the end."""

    kind: str
    depth: float
    facts: tuple[tuple[float, str], ...]
    question: str
    answer: str


def needles(kind: str, depth: float, seed: int) -> list[Needle]:
    """One case of `single` and `multi-hop`; one question for each of four facts of `several`."""
    draw = random.Random(f"{kind} {depth} {seed}")
    names, cities = draw.sample(_NAMES, 4), draw.sample(_CITIES, 2)
    codes = [str(draw.randrange(1000, 10000)) for _ in names]
    facts = [f"\n\nRemember this: the secret number of {name} is {code}.\n\n" for name, code in zip(names, codes, strict=True)]
    if kind == "single":
        return [Needle(kind, depth, ((depth, facts[0]),), _question(names[0]), codes[0])]
    if kind == "several":
        places = tuple((min(1.0, max(0.0, (depth + i / 4) % 1.0)), fact) for i, fact in enumerate(facts))
        return [Needle(kind, depth, places, _question(name), code) for name, code in zip(names, codes, strict=True)]
    home = f"\n\nRemember this: {names[0]} lives in {cities[0]}. {names[1]} lives in {cities[1]}.\n\n"
    door = f"\n\nRemember this: whoever lives in {cities[0]} opens the door with the secret number {codes[0]}.\n\n"
    asked = f"\n\nQuestion: {names[0]} lives in {cities[0]}. What is the secret number of whoever lives there?\nAnswer: the number is"
    return [Needle(kind, depth, ((depth, door), ((depth + 0.4) % 1.0, home)), asked, codes[0])]


def _question(name: str) -> str:
    return f"\n\nQuestion: what is the secret number of {name}?\nAnswer: the secret number of {name} is"


def prompt_ids(model: Model, text: str, length: int, facts: Sequence[tuple[float, str]]) -> Ids:
    """`length` ids: the text, with each fact at its depth."""
    pieces = sorted(((depth, as_ids(model.encode(fact, prefix=False))) for depth, fact in facts), key=lambda piece: piece[0])
    hay = text_ids(model, text, length, "the text")[:length - sum(len(piece) for _, piece in pieces)]
    if not len(hay):
        raise InvalidError(f"{length} tokens do not hold the facts")
    cuts = [max(1, round(depth * len(hay))) for depth, _ in pieces]   # the first token may be a begin token
    parts = []
    for start, end, piece in zip([0, *cuts], [*cuts, len(hay)], [*(piece for _, piece in pieces), hay[:0]], strict=True):
        parts += [hay[start:end], piece]
    return np.concatenate(parts)


def retrieve(
    model: Model, text: str, profiles: Mapping[str, Profile], *, lengths: Sequence[int], depths: Sequence[float], kinds: Sequence[str],
    seed: int = 0, beyond_trained: bool = False, report: Callable[[int, int], object] | None = None,
) -> dict[str, Any]:
    """Ask for hidden facts under dense attention and under each profile. A fact is found if each token of the answer is the most
    likely one. All questions of one prompt share its computation."""
    cases: list[dict[str, Any]] = []
    jobs = [(kind, length, depth) for kind in kinds for length in lengths for depth in depths]
    for done, (kind, length, depth) in enumerate(jobs):
        asked = needles(kind, depth, seed)
        ids = prompt_ids(model, text, length, asked[0].facts)
        with Prompts(model, ids, ROOM, profiles.values(), beyond_trained=beyond_trained) as prompts:
            for needle in asked:
                case: dict[str, Any] = {"kind": kind, "length": length, "depth": depth, "answer": needle.answer}
                with prompts.fork(PRESETS["exact"], "auto") as session:
                    case["dense"] = ask(session, needle)
                for name, profile in profiles.items():
                    with prompts.fork(profile) as session:
                        case[name] = ask(session, needle)
                cases.append(case)
        if report is not None:
            report(done + 1, len(jobs))
    return {"cases": cases, "summary": {name: _summary(cases, name) for name in ("dense", *profiles)}}


def ask(session: Session, needle: Needle) -> dict[str, Any]:
    """Log-probability of the answer after the question, and whether it would have been given."""
    question = as_ids(session.model.encode(needle.question, prefix=False))
    whole = as_ids(session.model.encode(needle.question + " " + needle.answer, prefix=False))
    common = next((i for i, (a, b) in enumerate(zip(question, whole, strict=False)) if a != b), min(len(question), len(whole)))
    answer = whole[common:]  # a space may belong to the number's first token, or be one
    run = forced(session, whole[:-1])
    rows = run.logprobs[common - 1:]
    return {"logprob": float(rows[np.arange(len(answer)), answer].sum()), "found": bool((rows.argmax(axis=1) == answer).all())}


def _summary(cases: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    known = [case for case in cases if case["dense"]["found"]]
    return {
        "found": sum(case[name]["found"] for case in cases), "of": len(cases),
        "found_of_dense": sum(case[name]["found"] for case in known), "dense_found": len(known),
        "logprob_loss": float(np.mean([case["dense"]["logprob"] - case[name]["logprob"] for case in cases])) if cases else 0.0,
    }
