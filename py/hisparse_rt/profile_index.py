# SPDX-License-Identifier: Apache-2.0
"""What profiles need of a session or choose for it: by themselves, to plan; and of one that serves several of them, to measure."""
from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from .errors import InvalidError
from .profile import Profile

_KINDS = ("sketch", "cluster", "minmax", "gaussian")
_OF_ANY_INDEX = ("mean", "classic")


def own_index(profile: Profile, calibrated: bool) -> str:
    """The index that a session of this profile has by itself."""
    if profile.mode == "dense":
        return "none"
    selector = profile.rule(calibrated)
    return selector if selector in _KINDS else "minmax" if selector in _OF_ANY_INDEX else "none"


def index_of(profile: Profile, calibrated: bool) -> str:
    """The index to measure a profile with. A selector that any index serves, or none,
    gets sketches where these are possible: then it shares sessions with those that need them."""
    if profile.mode == "dense" or not calibrated or profile.rule(calibrated) in _KINDS:
        return own_index(profile, calibrated)
    return "sketch"


def format_of(kv: str, profile: Profile, calibrated: bool, dtype: str) -> str:
    """The key-value format of a session of this profile, with what auto stands for; dtype is that of the model."""
    if kv != "auto":
        return kv
    return "f32" if dtype == "f32" else "int8" if profile.mode == "sparse" and not calibrated else "bf16"


def keeps_history(profile: Profile) -> bool:
    return profile.mode == "sparse" and (profile.forced_history > 0 or profile.selector == "history")


def serving_all(profiles: Mapping[str, Profile], calibrated: bool) -> dict[str, Any]:
    """Options of a session that goes on under any of the profiles, having begun under the first; InvalidError where there is none."""
    first, *others = profiles
    for name in others:
        if keeps_history(profiles[name]) and not keeps_history(profiles[first]):
            raise InvalidError(f"{name} reads a history of attention, which one that begins under {first} does not have: begin with it")
    return _pages(profiles) | {"index": _index(profiles, calibrated)}


def _pages(profiles: Mapping[str, Profile]) -> dict[str, int]:
    """Window and sink, which sessions have for life."""
    options = {name: profile.session_options() for name, profile in profiles.items() if profile.mode == "sparse"}
    for name, other in itertools.pairwise(options):
        if options[name] != options[other]:
            raise InvalidError(f"{name} and {other} want windows or sinks of their own, and a session has one of each")
    return next(iter(options.values()), {})


def _index(profiles: Mapping[str, Profile], calibrated: bool) -> str:
    kinds = {name: index_of(profile, calibrated) for name, profile in profiles.items()}
    needed = {kind: name for name, kind in kinds.items() if kind != "none" and profiles[name].rule(calibrated) not in _OF_ANY_INDEX}
    if set(needed) == {"sketch", "cluster"}:
        return "cluster"    # of which the sketches are a part
    if len(needed) > 1:
        (one, name), (two, other) = list(needed.items())[:2]
        raise InvalidError(f"{name} reads an index of kind {one} and {other} one of kind {two}, and a session has one")
    return next(iter(needed), None) or next((kind for kind in kinds.values() if kind != "none"), "none")
