# SPDX-License-Identifier: Apache-2.0
"""Rotary position parameters: every spelling of config.json and GGUF, reduced to what docs/model-file.md stores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import ConvertError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_ALIASES = {"su": "longrope"}
_LARGEST = 1e30  # the runtime refuses settings from here on


@dataclass(frozen=True)
class Rope:
    kind: str  # static, dynamic, longrope
    rotary_dim: int
    inv_freq: np.ndarray  # float64 [rotary_dim / 2]
    attention_factor: float = 1.0
    inv_freq_long: np.ndarray | None = None  # longrope
    base: float | None = None  # dynamic
    factor: float | None = None  # dynamic
    original_context: int | None = None  # dynamic, longrope


def from_config(config: dict, head_dim: int, max_position: int, warnings: list[str]) -> Rope:
    """The rope of a Hugging Face config."""
    params = _merge(config, warnings)
    return build(params, _rotary_dim(head_dim, params.get("partial_rotary_factor")), max_position)


def _merge(config: dict, warnings: list[str]) -> dict:
    """One flat dict with rope_type, rope_theta and the rest, by the precedence of the transformers library: rope_scaling
    replaces rope_parameters, an inner rope_theta wins over an outer one."""
    old, new = (_rope_dict(config, key) for key in ("rope_scaling", "rope_parameters"))
    if old and new and old != new:
        warnings.append("config.json has both rope_scaling and rope_parameters; rope_scaling is used")
    params = dict(old or new)
    params["rope_type"] = _rope_type(params)
    if params["rope_type"] == "default" and params.get("factor") not in (None, 1):  # of a scaling that is then not done
        if not _named_types(old or new):
            raise ConvertError(f"config.json: the rope settings have a factor, {params['factor']!r}, and no rope_type")
        warnings.append(f"config.json: rope type 'default' has no use for the factor {params['factor']!r}")
    for key, default in (("rope_theta", 10000.0), ("partial_rotary_factor", None)):
        outer = config.get(key)
        if params.get(key) is None:
            params[key] = default if outer is None else outer
        elif outer is not None and outer != params[key]:
            warnings.append(f"config.json gives {key} twice, {outer} and, inside the rope settings, {params[key]}; the inner one is used")
    if config.get("original_max_position_embeddings") is not None and params["rope_type"] in ("llama3", "yarn", "longrope"):
        params["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return params


def _rope_dict(config: dict, key: str) -> dict:
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConvertError(f"config.json: {key} is neither an object nor null")
    nested = [inner for inner, part in value.items() if isinstance(part, dict)]
    if nested:
        raise ConvertError(f"config.json: {key} has settings per kind of layer ({', '.join(map(str, nested))}), which is not supported")
    return value


def _named_types(params: dict) -> dict:
    return {key: params[key] for key in ("rope_type", "type") if params.get(key) is not None}


def _rope_type(params: dict) -> str:
    named = _named_types(params)
    for key, value in named.items():
        if not isinstance(value, str):
            raise ConvertError(f"config.json: rope {key} {value!r} is not a string")
    kinds = {_ALIASES.get(value, value) for value in named.values()}
    if len(kinds) > 1:
        raise ConvertError(f"config.json: rope_type {named['rope_type']!r} and type {named['type']!r} contradict each other")
    return kinds.pop() if kinds else "default"


def _rotary_dim(head_dim: int, partial: Any) -> int:
    fraction = 1.0 if partial is None else number({"partial_rotary_factor": partial}, "partial_rotary_factor")
    if fraction > 1:
        raise ConvertError(f"partial_rotary_factor {fraction:g} is above 1")
    rotary = int(head_dim * fraction)
    if rotary % 2 or not 2 <= rotary <= head_dim:
        raise ConvertError(
            f"partial_rotary_factor {fraction:g} of head_dim {head_dim} rotates {rotary} components, not an even number of them"
        )
    return rotary


def build(params: dict, rotary_dim: int, max_position: int, divisors: np.ndarray | None = None) -> Rope:
    """params: rope_type, rope_theta and what the type needs. divisors: per-frequency divisors of a GGUF file."""
    kind = params["rope_type"]
    if kind not in KINDS:
        raise ConvertError(f"rope type {kind!r} is not supported (supported: {', '.join(KINDS)})")
    base = number(params, "rope_theta")
    if base <= 1:
        raise ConvertError(f"rope_theta {base:g} is not above 1")
    if divisors is not None and kind in ("dynamic", "longrope"):
        raise ConvertError(f"rope type {kind!r} together with per-frequency divisors is not supported")
    try:
        with np.errstate(all="ignore"):
            inv_freq = base ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
            rope = _of_kind(params, inv_freq if divisors is None else inv_freq / divisors, max_position)
            tables = [table for table in (rope.inv_freq, rope.inv_freq_long, np.array([rope.attention_factor])) if table is not None]
            if not all(np.isfinite(table.astype(np.float32)).all() for table in tables):
                raise OverflowError
    except ArithmeticError as error:
        raise ConvertError(f"the settings of rope type {kind!r} give numbers that are not finite") from error
    return rope


def _of_kind(params: dict, inv_freq: np.ndarray, max_position: int) -> Rope:
    kind, rotary_dim = params["rope_type"], 2 * len(inv_freq)
    if kind == "default":
        return Rope("static", rotary_dim, inv_freq)
    if kind == "linear":
        return Rope("static", rotary_dim, inv_freq / number(params, "factor"))
    if kind == "dynamic":
        return _dynamic(params, inv_freq, max_position)
    original = _original_context(params, max_position)
    if kind == "llama3":
        return Rope("static", rotary_dim, _llama3(params, inv_freq, original))
    if kind == "yarn":
        return _yarn(params, inv_freq, original, max_position)
    return _longrope(params, inv_freq, original, max_position)


def number(params: dict, key: str, default: float | None = None) -> float:
    """A positive number that a model file may hold, also when it is spelled as a string."""
    value = params.get(key)
    if value is None:
        if default is None:
            raise ConvertError(f"setting {key!r} is missing")
        return default
    try:
        if isinstance(value, bool):
            raise ValueError
        result = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConvertError(f"setting {key!r} is {value!r}, not a number") from error
    if not 0 < result < _LARGEST:
        raise ConvertError(f"setting {key!r} is {value!r}, not a positive number below {_LARGEST:g}")
    return result


def _original_context(params: dict, max_position: int) -> int:
    value = number(params, "original_max_position_embeddings", float(max_position))
    if value != int(value) or not 2 <= value < 1 << 31:
        raise ConvertError(f"rope setting 'original_max_position_embeddings' is {value:g}, not a count of at least 2")
    return int(value)


def _dynamic(params: dict, inv_freq: np.ndarray, max_position: int) -> Rope:
    factor, rotary_dim = number(params, "factor"), 2 * len(inv_freq)
    if factor < 1:
        raise ConvertError(f"rope setting 'factor' is {factor:g}, below 1, with rope type 'dynamic'")
    if rotary_dim <= 2:
        raise ConvertError(f"rope type 'dynamic' needs more than {rotary_dim} rotating components")
    return Rope("dynamic", rotary_dim, inv_freq, base=number(params, "rope_theta"), factor=factor, original_context=max_position)


def _llama3(params: dict, inv_freq: np.ndarray, original: int) -> np.ndarray:
    factor, low, high = (number(params, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if low == high:
        raise ConvertError(f"rope settings 'low_freq_factor' and 'high_freq_factor' are both {low:g}")
    turns = original * inv_freq / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - keep) * inv_freq / factor + keep * inv_freq


def _yarn(params: dict, inv_freq: np.ndarray, original: int, max_position: int) -> Rope:
    factor, base = number(params, "factor", max_position / original), number(params, "rope_theta")
    rotary_dim = 2 * len(inv_freq)

    def dim_of(turns: float) -> float:
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    low, high = dim_of(number(params, "beta_fast", 32.0)), dim_of(number(params, "beta_slow", 1.0))
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(rotary_dim // 2) - low) / (high - low), 0.0, 1.0)
    if params.get("attention_factor") is not None:
        attention = number(params, "attention_factor")
    elif params.get("mscale") and params.get("mscale_all_dim"):
        attention = mscale(number(params, "mscale")) / mscale(number(params, "mscale_all_dim"))
    else:
        attention = mscale(1.0)
    return Rope("static", rotary_dim, inv_freq * (1 - ramp) + inv_freq / factor * ramp, attention)


def _longrope(params: dict, inv_freq: np.ndarray, original: int, max_position: int) -> Rope:
    factor, rotary_dim = number(params, "factor", max_position / original), 2 * len(inv_freq)
    if params.get("attention_factor") is not None:
        attention = number(params, "attention_factor")
    else:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = (_factors(params, key, rotary_dim // 2) for key in ("short_factor", "long_factor"))
    return Rope("longrope", rotary_dim, inv_freq / short, attention, inv_freq_long=inv_freq / long, original_context=original)


def _factors(params: dict, key: str, count: int) -> np.ndarray:
    values = params.get(key)
    if not isinstance(values, list) or len(values) != count:
        raise ConvertError(f"rope setting {key!r} is not a list of {count} numbers")
    return np.array([number({key: value}, key) for value in values], np.float64)
