# SPDX-License-Identifier: Apache-2.0
"""Tokenizer, chat template, special tokens and sampling defaults of a Hugging Face folder."""

from __future__ import annotations

import json
import os
from typing import Any

from tokenizers import Tokenizer

from .errors import ConvertError, listed, shown
from .files import RangeFile, read_json_object, read_text
from .spec import TokenizerData, sampling_defaults

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OTHER_FORMATS = ("tokenizer.model", "tekken.json", "vocab.json")
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def read(folder: str, config: dict, files: list[RangeFile], warnings: list[str]) -> TokenizerData:
    settings = _optional_json(folder, "tokenizer_config.json", files)
    generation = _optional_json(folder, "generation_config.json", files)
    data = TokenizerData()
    tokenizer = _read_tokenizer(folder, data, files, warnings)
    data.special_tokens = _special_tokens(settings, _optional_json(folder, "special_tokens_map.json", files))
    data.chat_template = _chat_template(folder, settings, files, warnings) or None
    data.generation = sampling_defaults({key: generation.get(key) for key in _SAMPLING}, "generation_config.json", warnings)
    places = [("generation_config.json", generation), ("config.json", config)]
    for name, values in places:
        data.eos += [i for i in _ids(values.get("eos_token_id"), f"{name}: eos_token_id") if i not in data.eos]
    _add_spelled_ids(data, tokenizer)
    begins = [i for name, values in places for i in _ids(values.get("bos_token_id"), f"{name}: bos_token_id")]
    data.bos = begins[0] if begins else data.bos
    return data


def _optional(folder: str, name: str, files: list[RangeFile]) -> str | None:
    path = os.path.join(folder, name)
    if not os.path.lexists(path):  # a link that leads nowhere is a download that is not complete
        return None
    files.append(RangeFile(path))
    return path


def _optional_json(folder: str, name: str, files: list[RangeFile]) -> dict:
    path = _optional(folder, name, files)
    return {} if path is None else read_json_object(path)


def _read_tokenizer(folder: str, data: TokenizerData, files: list[RangeFile], warnings: list[str]) -> Tokenizer | None:
    path = _optional(folder, "tokenizer.json", files)
    if path is None:
        others = [name for name in _OTHER_FORMATS if os.path.exists(os.path.join(folder, name))]
        if others:
            raise ConvertError(
                f"{shown(folder)} has a tokenizer only as {listed(others)}; tokenizer.json is needed (transformers can save one)"
            )
        warnings.append("there is no tokenizer.json; the model will take token ids only")
        return None
    data.json = read_text(path)
    tokenizer = load(data.json, shown(path))
    data.size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if data.size == 0:
        raise ConvertError(f"{shown(path)} has no tokens")
    return tokenizer


def load(text: str, where: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise ConvertError(f"{where} is not a tokenizer that can be loaded: {error}") from error


def _spelling(value: Any) -> str | None:
    """A special token is a string or an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(settings: dict, fallback: dict) -> dict[str, str]:
    found = {}
    for name in _SPECIAL:
        spelling = _spelling(settings[name] if name in settings else fallback.get(name))
        if spelling is not None:
            found[name] = spelling
    more = settings.get("extra_special_tokens")
    if isinstance(more, dict):
        found |= {name: spelling for name, value in more.items() if (spelling := _spelling(value)) is not None}
    return found


def _add_spelled_ids(data: TokenizerData, tokenizer: Tokenizer | None) -> None:
    """The ids of the tokenizer's own begin and end tokens."""
    if tokenizer is None:
        return
    end = tokenizer.token_to_id(data.special_tokens.get("eos_token", ""))
    if end is not None and end not in data.eos:
        data.eos.append(end)
    data.bos = tokenizer.token_to_id(data.special_tokens.get("bos_token", ""))


def _ids(value: Any, where: str) -> list[int]:
    """Token ids from a number, a list of numbers or null."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int for i in values):
        raise ConvertError(f"{where} is {json.dumps(value)}, not a token id or a list of them")
    return values


def _chat_template(folder: str, settings: dict, files: list[RangeFile], warnings: list[str]) -> str | None:
    """The file of its own wins over tokenizer_config.json, where the template is a string or a list of named ones."""
    path = _optional(folder, "chat_template.jinja", files)
    if path is not None:
        return read_text(path)
    value = settings.get("chat_template")
    if isinstance(value, list):
        given = [item for item in value if isinstance(item, dict)]
        named = {item["name"]: item.get("template") for item in given if isinstance(item.get("name"), str)}
        value = named.get("default")
        if value is None and given:
            names = f" ({listed(named)})" if named else ""
            warnings.append(f"none of the chat templates{names} is called 'default'; none is used")
    if value is not None and not isinstance(value, str):
        raise ConvertError(f"{shown(folder)}: chat_template in tokenizer_config.json is not a string")
    return value or None
