# SPDX-License-Identifier: Apache-2.0
"""tokenizer.json out of the `tokenizer.ggml.*` keys of a GGUF file."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from .errors import ConvertError, listed
from .spec import TokenizerData, sampling_defaults

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> list:
    return [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def _gpt2(*before: Any) -> list:
    return [*before, pre_tokenizers.ByteLevel(add_prefix_space=False)]


class _Splitter:
    """What the name of a pre-tokenizer stands for."""

    def __init__(self, steps: list, nfc: bool = False, ignore_merges: bool = False, add_bos: bool = False):
        self.steps, self.nfc, self.ignore_merges, self.add_bos = steps, nfc, ignore_merges, add_bos


def _splitters() -> dict[str, _Splitter]:
    llama3 = _Splitter(_split(rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"), ignore_merges=True, add_bos=True)
    digits = _Splitter(_gpt2(pre_tokenizers.Digits(individual_digits=True)))
    return {
        "gpt-2": _Splitter(_gpt2()),
        "smollm": digits,
        "starcoder": digits,
        "llama-bpe": llama3,
        "llama3": llama3,
        "llama-v3": llama3,
        "qwen2": _Splitter(_split(rf"{_ENDINGS}|{_LETTERS}|\p{{N}}|{_REST}"), nfc=True),
        "tekken": _Splitter(_split(_TEKKEN), ignore_merges=True, add_bos=True),
    }


def read(where: str, metadata: dict[str, Any], allow_unknown: bool, warnings: list[str]) -> TokenizerData:
    keys = _Keys(where, metadata)
    generation = sampling_defaults(_generation(metadata), where, warnings)
    data = TokenizerData(chat_template=keys.text("tokenizer.chat_template") or None, generation=generation)
    model = keys.text("tokenizer.ggml.model")
    if model in ("", "none", "no_vocab"):
        warnings.append("the file has no tokenizer; the model will take token ids only")
        return data
    vocabulary = _Vocabulary(keys)
    if model == "gpt2":
        tokenizer, add_bos = _byte_level(keys, vocabulary, allow_unknown, warnings)
    elif model == "llama":
        tokenizer, add_bos = _sentencepiece(keys, vocabulary), True
    else:
        raise ConvertError(f"{where}: tokenizer model {model!r} is not supported (supported: gpt2, llama)")
    data.bos, data.special_tokens = keys.token_id("bos", vocabulary), _special_tokens(keys, vocabulary)
    data.eos = list(dict.fromkeys(i for name in ("eos", "eot", "eom") if (i := keys.token_id(name, vocabulary)) is not None))
    vocabulary.add_special(tokenizer)
    _frame(tokenizer, keys, vocabulary, data, add_bos)
    data.json, data.size = tokenizer.to_str(), len(vocabulary.tokens)
    return data


class _Keys:
    """Typed access to the tokenizer's keys."""

    def __init__(self, where: str, values: dict[str, Any]):
        self.where, self.values = where, values

    def text(self, key: str) -> str:
        value = self.values.get(key, "")
        if not isinstance(value, str):
            raise ConvertError(f"{self.where}: key {key!r} is not a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise ConvertError(f"{self.where}: key {key!r} is not a truth value")
        return value

    def strings(self, key: str) -> list[str]:
        value = self.values.get(key)
        if not isinstance(value, list):
            raise ConvertError(f"{self.where}: key {key!r} is {'missing' if value is None else 'not an array of strings'}")
        return value

    def numbers(self, key: str, kind: str, count: int) -> np.ndarray | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kind:
            raise ConvertError(f"{self.where}: key {key!r} is not an array of {'whole numbers' if 'i' in kind else 'floats'}")
        if len(value) != count:
            raise ConvertError(f"{self.where}: key {key!r} has {len(value)} values for {count} tokens")
        return value

    def token_id(self, name: str, vocabulary: _Vocabulary) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.values.get(key)
        if value is None or type(value) is int and value in (0xFFFFFFFF, -1):  # all ones: none
            return None
        if type(value) is not int or not 0 <= value < len(vocabulary.tokens):
            raise ConvertError(f"{self.where}: key {key!r} is {value!r}, not one of the {len(vocabulary.tokens)} tokens")
        return value


class _Vocabulary:
    """Tokens with their types. Unused ones at the end are padding of the embedding and left out."""

    def __init__(self, keys: _Keys):
        tokens = keys.strings("tokenizer.ggml.tokens")
        types = keys.numbers("tokenizer.ggml.token_type", "iu", len(tokens))
        self.types = [_NORMAL] * len(tokens) if types is None else types.tolist()
        count = len(tokens)
        while count and self.types[count - 1] == _UNUSED:
            count -= 1
        self.stated, self.tokens, self.types = len(tokens), tokens[:count], self.types[:count]
        if count == 0:
            raise ConvertError(f"{keys.where}: 'tokenizer.ggml.tokens' has no tokens in use")
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) != count:
            twice = [token for token, n in Counter(self.tokens).items() if n > 1]
            raise ConvertError(f"{keys.where}: 'tokenizer.ggml.tokens' holds tokens twice: {listed(map(repr, twice))}")

    def add_special(self, tokenizer: Tokenizer) -> None:
        """Control tokens are never made from plain merges; user-defined ones are ordinary text that is kept whole."""
        wanted = [(token, kind) for token, kind in zip(self.tokens, self.types) if kind in (_UNKNOWN, _CONTROL, _USER)]
        tokenizer.add_tokens([AddedToken(token, special=kind != _USER, normalized=False) for token, kind in wanted])


def _special_tokens(keys: _Keys, vocabulary: _Vocabulary) -> dict[str, str]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding", "sep_token": "seperator"}
    ids = {name: keys.token_id(short, vocabulary) for name, short in names.items()}
    return {name: vocabulary.tokens[i] for name, i in ids.items() if i is not None}


def _generation(metadata: dict[str, Any]) -> dict:
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}
    values = {name: metadata.get(f"general.sampling.{key}") for key, name in names.items()}
    return {name: float(str(np.float32(value))) if isinstance(value, float) else value for name, value in values.items()}


def _frame(tokenizer: Tokenizer, keys: _Keys, vocabulary: _Vocabulary, data: TokenizerData, add_bos: bool) -> None:
    """Encoding puts the begin and end tokens round the text if the file says so."""
    begin = data.bos if keys.flag("tokenizer.ggml.add_bos_token", add_bos) else None
    end = keys.token_id("eos", vocabulary) if keys.flag("tokenizer.ggml.add_eos_token", False) else None
    around = [(vocabulary.tokens[i], i) for i in (begin, end) if i is not None]
    if not around:
        return
    before, after = [[vocabulary.tokens[i]] if i is not None else [] for i in (begin, end)]
    second = [f"{token}:1" for token in before] + ["$B:1"] + [f"{token}:1" for token in after]
    tokenizer.post_processor = processors.Sequence(
        [
            *([processors.ByteLevel(trim_offsets=False)] if isinstance(tokenizer.decoder, decoders.ByteLevel) else []),
            processors.TemplateProcessing(single=[*before, "$A", *after], pair=[*before, "$A", *after, *second], special_tokens=around),
        ]
    )


# ---- byte-level BPE ---------------------------------------------------------------------------------------------


def _byte_level(keys: _Keys, vocabulary: _Vocabulary, allow_unknown: bool, warnings: list[str]) -> tuple[Tokenizer, bool]:
    splitter = _splitter(keys, allow_unknown, warnings)
    merges = [tuple(merge.split(" ", 1)) for merge in keys.strings("tokenizer.ggml.merges")]
    if any(len(merge) != 2 for merge in merges):
        raise ConvertError(f"{keys.where}: key 'tokenizer.ggml.merges' holds an entry that is not two tokens")
    tokenizer = _build(keys, lambda: models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=splitter.ignore_merges))
    if splitter.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitter.steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitter.add_bos


def _splitter(keys: _Keys, allow_unknown: bool, warnings: list[str]) -> _Splitter:
    name, known = keys.text("tokenizer.ggml.pre"), _splitters()
    if name in known:
        return known[name]
    what = f"pre-tokenizer {name!r} is not known" if name else "there is no 'tokenizer.ggml.pre', which names the pre-tokenizer"
    if not allow_unknown:
        raise ConvertError(f"{keys.where}: {what} (known: {', '.join(known)}); text would be split wrongly")
    warnings.append(f"{what}; text is split as by GPT-2, which may be wrong")
    return known["gpt-2"]


def _build(keys: _Keys, make: Any) -> Tokenizer:
    try:
        return Tokenizer(make())
    except Exception as error:  # the library raises plain Exception
        raise ConvertError(f"{keys.where}: the tokenizer cannot be built: {error}") from error


# ---- sentencepiece BPE ------------------------------------------------------------------------------------------


def _sentencepiece(keys: _Keys, vocabulary: _Vocabulary) -> Tokenizer:
    """Merges are not stored: any two pieces may merge into a third, the best score first."""
    scores = keys.numbers("tokenizer.ggml.scores", "f", vocabulary.stated)
    if scores is None:
        raise ConvertError(f"{keys.where}: key 'tokenizer.ggml.scores' is missing")
    unknown = next((token for token, kind in zip(vocabulary.tokens, vocabulary.types) if kind == _UNKNOWN), None)
    bytes_known = _BYTE in vocabulary.types
    merges = _merges_by_score(vocabulary, scores)
    tokenizer = _build(
        keys, lambda: models.BPE(vocab=vocabulary.ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=bytes_known)
    )
    prefix = keys.flag("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return tokenizer


def _merges_by_score(vocabulary: _Vocabulary, scores: np.ndarray) -> list[tuple[str, str]]:
    pieces = {token: i for token, i in vocabulary.ids.items() if vocabulary.types[i] == _NORMAL}
    order = sorted((token for token in pieces if len(token) > 1), key=lambda token: (-scores[pieces[token]], pieces[token]))
    return [(token[:at], token[at:]) for token in order for at in range(1, len(token)) if token[:at] in pieces and token[at:] in pieces]
