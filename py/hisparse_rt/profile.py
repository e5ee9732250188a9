# SPDX-License-Identifier: Apache-2.0
"""How a session attends: the settings of sparse attention, their presets, and the file hi-sparse-config.json."""
from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ._library import lib
from .calibration import CLASSES
from .checks import content, integer, real
from .errors import InvalidError, from_os_error

SELECTORS = {
    "auto": lib.HSR_SELECT_AUTO, "sketch": lib.HSR_SELECT_SKETCH, "mean": lib.HSR_SELECT_MEAN, "classic": lib.HSR_SELECT_CLASSIC,
    "minmax": lib.HSR_SELECT_MINMAX, "gaussian": lib.HSR_SELECT_GAUSSIAN, "cluster": lib.HSR_SELECT_CLUSTER,
    "history": lib.HSR_SELECT_HISTORY, "random": lib.HSR_SELECT_RANDOM, "oracle": lib.HSR_SELECT_ORACLE,
}
MODES = ("dense", "sparse")
LATE = {"wait": lib.HSR_LATE_WAIT, "estimate": lib.HSR_LATE_ESTIMATE}
_PAGE = 64
_SLICES = (16, 32, 64)
_MOST = 1_000_000_000
_INT32 = (1 << 31) - 1
_BUDGET = (16, _MOST)
# Lowest and highest value of every whole number.
_RANGES = {
    "budget": _BUDGET, "forced_history": (0, 64), "candidates": (0, _MOST), "dense_below": (0, _INT32),
    "prefill_dense_below": (0, _INT32), "prefill_budget": (0, _MOST), "block_size_coarse": (_PAGE, 1 << 20), "top_k_coarse": (1, _MOST),
    "top_k_fine": (1, _MOST), "window_size": (_PAGE, 1 << 30), "sink_size": (0, 1 << 30), "seed": (0, (1 << 64) - 1),
}
_PAGED = ("block_size_coarse", "window_size", "sink_size")
_SESSION = ("window_size", "sink_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Settings of sparse attention. The names are those of hi-sparse-config.json; ranges are checked at once, by name."""

    mode: str = "sparse"
    """dense: read all keys and values; everything below but window_size and sink_size then means nothing."""
    budget: int = 1024
    """Tokens that each query reads in each layer and key-value head, besides sink and window: whole slices, at least one."""
    sparse_ratio: float = 0.0
    """The budget is at least this share of the tokens outside sink and window, 0 to 1."""
    slice_size: int = 16
    """Tokens that are chosen together: 16, 32 or 64."""
    selector: str = "auto"
    """The rule that chooses; auto is cluster for a calibrated model, else minmax, without virtual tokens."""
    virtual_tokens: bool = True
    """What is not read counts with its estimated weight and its mean value (selectors sketch and cluster)."""
    late: str = "wait"
    """What decoding does about a chosen page that is still in cold storage: wait for it; or estimate, which goes on with its virtual
    tokens and reads the page for later, so that results depend on what was in memory. Only where virtual tokens are in use."""
    forced_history: int = 0
    """Pages of 64 tokens of the highest attention so far that are read beside the budget, 0 to 64; prompt runs do without."""
    candidates: int = 0
    """cluster: tokens whose sketches are scored; 0 is four for each token of the budget, at least 4096."""
    dense_below: int = 0
    """Positions below this are computed densely."""
    prefill_dense_below: int = 65536
    """Prompts are computed densely up to this position."""
    prefill_budget: int = 4096
    """Tokens that a run of 128 prompt tokens reads beyond it; 0: prompts are always dense."""
    dense_layers: tuple[int, ...] = ()
    """Layers that always attend densely."""
    layer_budgets: tuple[tuple[int, int], ...] = ()
    """Layers with a budget of their own, as (layer, budget); in JSON under "layers"."""
    dense_classes: tuple[str, ...] = ()
    """Classes of layers, as calibration found them ("gaussian" or "sketch"), that always attend densely; in JSON under "layers"."""
    class_budgets: tuple[tuple[str, int], ...] = ()
    """Classes with a budget of their own, but for the layers that have one; in JSON under "layers"."""
    window_size: int | None = None
    """Most recent tokens that are always read, a multiple of 64; None is the session's, which is 512."""
    sink_size: int | None = None
    """First tokens that are always read, a multiple of 64; None is the session's, which is 64."""
    block_size_coarse: int = 1024
    """classic: tokens of a coarse block."""
    block_size_fine: int = 64
    """classic: tokens of a fine block: 16, 32 or 64."""
    top_k_coarse: int = 32
    """classic: coarse blocks kept."""
    top_k_fine: int = 16
    """classic: fine blocks kept, on average per coarse block that was kept."""
    seed: int = 0
    """random: where its numbers start."""

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, MODES)
        _one_of("selector", self.selector, SELECTORS)
        _one_of("late", self.late, LATE)
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in _SESSION:
                object.__setattr__(self, name, integer(name, value, low, high))
        for name in _PAGED:
            value = getattr(self, name)
            if value is not None and value % _PAGE:
                raise InvalidError(f"{name} is {value}, allowed are multiples of {_PAGE}")
        for name in ("slice_size", "block_size_fine"):
            if integer(name, getattr(self, name), 0, _INT32) not in _SLICES:
                raise InvalidError(f"{name} is {getattr(self, name)}, allowed are 16, 32 and 64: slices divide pages of {_PAGE} tokens")
        ratio = real("sparse_ratio", self.sparse_ratio)
        if not 0 <= ratio <= 1:
            raise InvalidError(f"sparse_ratio is {ratio:g}, allowed are 0 to 1")
        object.__setattr__(self, "sparse_ratio", ratio)
        if not isinstance(self.virtual_tokens, bool):
            raise TypeError(f"virtual_tokens must be true or false, not {self.virtual_tokens!r}")
        object.__setattr__(self, "dense_layers", _layers(self.dense_layers))
        object.__setattr__(self, "layer_budgets", _budgets(self.layer_budgets))
        object.__setattr__(self, "dense_classes", tuple(sorted(_one_of("a class", name, CLASSES) for name in self.dense_classes)))
        object.__setattr__(self, "class_budgets", _class_budgets(self.class_budgets))
        self._check_slices()

    def _check_slices(self) -> None:
        """With less than a slice nothing would be selected; budgets are rounded up to 16 first."""
        name = "block_size_fine" if self.selector == "classic" else "slice_size"
        slice_size = getattr(self, name)
        budgets = [("budget", self.budget), ("prefill_budget", self.prefill_budget)]
        budgets += [(f"the budget of layer {layer}", budget) for layer, budget in self.layer_budgets]
        budgets += [(f"the budget of class {name}", budget) for name, budget in self.class_budgets]
        for what, budget in budgets:
            if 0 < budget <= slice_size - _SLICES[0]:
                raise InvalidError(f"{what} is {budget}, and nothing smaller than {name} is selected, which is {slice_size}")

    def for_layers(self, classes: Sequence[str] | None) -> Profile:
        """The same with layers in place of their classes; InvalidError if it names some and the model has none."""
        if not (self.dense_classes or self.class_budgets):
            return self
        if classes is None:
            named = ", ".join(dict.fromkeys([*self.dense_classes, *(name for name, _ in self.class_budgets)]))
            raise InvalidError(f"layers names the class {named}, and the model has no classes of layers: hisparse-rt calibrate finds them")
        of_class, own = dict(self.class_budgets), dict(self.layer_budgets)
        budgets = {layer: of_class[name] for layer, name in enumerate(classes) if name in of_class} | own
        dense = [layer for layer, name in enumerate(classes) if name in self.dense_classes and layer not in own]
        return replace(self, layer_budgets=tuple(budgets.items()), dense_layers=(*self.dense_layers, *dense), class_budgets=(),
                       dense_classes=())

    def native_fields(self, n_layers: int) -> dict[str, Any]:
        """The fields of an hsr_profile for a model of n_layers; InvalidError for a layer it does not have."""
        for name, layers in (("dense_layers", self.dense_layers), ("layers", [layer for layer, _ in self.layer_budgets])):
            for layer in layers:
                if layer >= n_layers:
                    raise InvalidError(f"{name} names layer {layer}, and the model has the layers 0 to {n_layers - 1}")
        own = dict(self.layer_budgets)
        copied = {name: getattr(self, name) for name in _RANGES if name not in _SESSION}
        return copied | {
            "sparse": self.mode == "sparse", "selector": SELECTORS[self.selector], "sparse_ratio": self.sparse_ratio,
            "slice_size": self.slice_size, "virtual_tokens": self.virtual_tokens,
            "block_size_fine": self.block_size_fine, "late": LATE[self.late],
            "dense_layers": list(self.dense_layers), "layer_budgets": [own.get(layer, 0) for layer in range(n_layers)] if own else [],
        }

    def rule(self, calibrated: bool) -> str:
        """The selector, with what auto stands for."""
        return self.selector if self.selector != "auto" else "cluster" if calibrated else "minmax"

    def session_options(self) -> dict[str, int]:
        """What the profile asks of a session: window_size and sink_size, if it names them."""
        return {name: getattr(self, name) for name in _SESSION if getattr(self, name) is not None}


ProfileLike = Profile | Mapping[str, Any] | str | os.PathLike[str] | int
"""A Profile; the name of a preset; the path of a JSON file, or what it would hold; or the id of a registered profile."""


def as_profile(value: ProfileLike) -> Profile:
    """The profile that `value` stands for; InvalidError names what is wrong with it."""
    if isinstance(value, Profile):
        return value
    if isinstance(value, Mapping):
        return from_settings(value, "the profile")
    if isinstance(value, str) and value in PRESETS:
        return PRESETS[value]
    if isinstance(value, (str, os.PathLike)):
        return read_profile(value)
    raise TypeError(f"a profile is a Profile, the name of a preset, a JSON file or its content, not {value!r}")


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """The profile of a JSON file such as hi-sparse-config.json."""
    name = os.fspath(path)
    if "\0" in name or not os.path.exists(name) and os.sep not in name and not name.endswith(".json"):
        raise InvalidError(f"there is no profile {name!r}: known presets are {', '.join(PRESETS)}, everything else is a JSON file")
    try:
        held = content(name)
    except OSError as error:
        raise from_os_error(f"cannot read the profile {name}", error) from error
    try:
        data = json.loads(held.decode("utf-8"), object_pairs_hook=_unique)
    except InvalidError as error:
        raise InvalidError(f"{name}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidError(f"{name} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidError(f"{name} does not hold a JSON object")
    return from_settings(data, name)


def from_settings(settings: Mapping[str, Any], where: str) -> Profile:
    """The profile of a JSON object. "preset" names what to start from; every other key changes one setting of it."""
    values = dict(settings)
    try:
        start = values.pop("preset", "balanced" if values.get("mode") != "dense" else "exact")
        _one_of("preset", start, PRESETS)
        _other_name_of_window(values)
        layers = values.pop("layers", {})
        _one_of_keys(values)
        values |= _layer_settings(layers, values)
        for name in ("dense_layers",):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        return replace(PRESETS[start], **values)
    except (InvalidError, TypeError) as error:
        raise InvalidError(f"{where}: {error}") from None


_KEYS = [item.name for item in fields(Profile) if item.name not in ("layer_budgets", "dense_classes", "class_budgets")]


def _one_of_keys(values: Mapping[str, Any]) -> None:
    for key in values:
        if key not in _KEYS:
            raise InvalidError(f"there is no setting {key!r}; the settings are {', '.join(['preset', *_KEYS, 'layers'])}")


def _other_name_of_window(values: dict[str, Any]) -> None:
    """The classic rule calls the window local_window_tokens."""
    if "local_window_tokens" in values:
        window = values.pop("local_window_tokens")
        if values.setdefault("window_size", window) != window:
            raise InvalidError(f"window_size is {values['window_size']!r} and local_window_tokens, its other name, is {window!r}")


def _layer_settings(layers: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """What "layers" says: {"LAYER": {"mode": "dense"}} and {"LAYER": {"budget": 2048}}, of a layer's number or a class of layers."""
    if not isinstance(layers, Mapping):
        raise InvalidError("layers is not an object of layers, such as {\"3\": {\"budget\": 2048}}")
    dense, budgets = [], []
    for key, own in layers.items():
        if not (isinstance(key, int) or isinstance(key, str) and (key.isdecimal() or key in CLASSES)):
            raise InvalidError(f"layers names {key!r}, which is no layer number and no class of layers: {', '.join(CLASSES)}")
        if not isinstance(own, Mapping) or set(own) - {"mode", "budget"}:
            raise InvalidError(f"layers[{key}] may have the settings mode and budget")
        which = key if key in CLASSES else int(key)
        if _one_of("mode", own.get("mode", "sparse"), MODES) == "dense":
            dense.append(which)
        if "budget" in own:
            budgets.append((which, own["budget"]))
    result: dict[str, Any] = {}
    for name, classes in (("layer_budgets", False), ("class_budgets", True)):
        if found := tuple(one for one in budgets if isinstance(one[0], str) == classes):
            result[name] = found
    if numbers := [which for which in dense if not isinstance(which, str)]:
        given = values.get("dense_layers", ())
        result["dense_layers"] = (*(given if isinstance(given, (list, tuple)) else (given,)), *numbers)
    if names := [which for which in dense if isinstance(which, str)]:
        result["dense_classes"] = tuple(names)
    return result


def _one_of(name: str, value: Any, allowed: Iterable[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise InvalidError(f"{name} is {value!r}, known are {', '.join(allowed)}")
    return value


def _layers(value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InvalidError(f"dense_layers is {value!r}, not a list of layer numbers")
    return tuple(sorted({integer("a number in dense_layers", layer, 0, _INT32) for layer in value}))


def _budgets(value: Any) -> tuple[tuple[int, int], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    return tuple(sorted((integer("a layer", layer, 0, _INT32), integer(f"the budget of layer {layer}", budget, *_BUDGET))
                        for layer, budget in pairs))


def _class_budgets(value: Any) -> tuple[tuple[str, int], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    return tuple(sorted((_one_of("a class", name, CLASSES), integer(f"the budget of class {name}", budget, *_BUDGET))
                        for name, budget in pairs))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise InvalidError(f"the setting {key!r} is given twice")
        result[key] = value
    return result


PRESETS = {
    "exact": Profile(mode="dense"),
    "balanced": Profile(budget=1024, dense_below=4096),
    "fast": Profile(budget=512, prefill_budget=2048, prefill_dense_below=32768),
    "long-document": Profile(selector="cluster", budget=2048, candidates=8192, dense_below=8192, prefill_budget=4096),
    "chat": Profile(budget=1024, dense_below=8192, prefill_dense_below=16384, prefill_budget=4096),
    "classic": Profile(selector="classic", budget=32768, slice_size=64, virtual_tokens=False, dense_below=4096),
}
