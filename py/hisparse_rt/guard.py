# SPDX-License-Identifier: Apache-2.0
"""Keeps the words of users apart from the control tokens of a chat template.

A template is a text with control tokens such as <|im_end|> spelled out, and messages are pasted into it. A message that
spells one must stay text. So the tokenizer is copied with every control token renamed to a secret spelling:

    1. in messages, spellings of control tokens are replaced by secret marks (`protect`), then the template is rendered
    2. the control tokens left in the result come from the template: they get their secret spelling
    3. the marks become the users' spellings again, and the copy encodes the whole: to it they are ordinary text

Everything else about the tokenizer stays, so messages without such spellings get the ids they always had.
"""
from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer

from .errors import TemplateError, TokenizerError

_OPEN, _CLOSE = "\ue000", "\ue001"  # private use; the random part between them is the secret


class Guard:
    """A tokenizer whose control tokens can be written by the template only.

    tokenizer_json  the tokenizer.json
    controls        id and spelling of every control token
    """

    def __init__(self, tokenizer_json: str, controls: dict[int, str]) -> None:
        self._secret = secrets.token_hex(8)
        self._controls = sorted(controls.values(), key=len, reverse=True)  # the longest first, as tokenizers match them
        self._renamed = {text: f"{_OPEN}{self._secret}c{i:x}{_CLOSE}" for i, text in enumerate(self._controls)}
        self._heads = {text[:n] for text in self._controls for n in range(1, len(text))}
        self._tails = {text[n:] for text in self._controls for n in range(1, len(text))}
        self._longest = max(map(len, self._controls), default=0)
        self._pattern = re.compile("|".join(map(re.escape, self._controls)) or r"(?!)")
        self._tokenizer = _renamed_tokenizer(tokenizer_json, self._renamed)
        for token, text in controls.items():
            if self._tokenizer.token_to_id(self._renamed[text]) != token:
                raise TokenizerError(f"the tokenizer cannot keep users' text apart: control token {text!r} does not keep its id {token}")

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text in which nothing is a control token, but for secret spellings."""
        return encode(self._tokenizer, text)

    def message_texts(self, allow: Iterable[str] = ()) -> MessageTexts:
        """A fresh set of marks, for one rendering. Spellings in `allow` are left to the role that may use them."""
        return MessageTexts(self, frozenset(allow))


class MessageTexts:
    """The marks of one rendering."""

    def __init__(self, guard: Guard, allow: frozenset[str]) -> None:
        self._guard = guard
        self._allow = allow
        self._texts: list[str] = []

    def protect(self, value: Any, *, trusted: bool = False) -> Any:
        """`value` (text, or lists and dicts of it) with marks in place of control tokens. trusted: `allow` applies."""
        if isinstance(value, str):
            return self._protect_text(value, trusted)
        if isinstance(value, dict):
            return {key: self.protect(item, trusted=trusted) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.protect(item, trusted=trusted) for item in value]
        return value

    def encode(self, rendered: str) -> list[int]:
        """Ids of what the template made of the protected messages."""
        guard = self._guard
        text = guard._pattern.sub(lambda match: guard._renamed[match[0]], rendered)
        return guard.encode_text(self._restore(text))

    def _restore(self, text: str) -> str:
        start = _OPEN + self._guard._secret + "m"
        for number, original in enumerate(self._texts):
            text = text.replace(f"{start}{number:x}{_CLOSE}", original)
        if start in text:
            raise TemplateError("the chat template cuts or rewrites message text in a way that would corrupt it")
        return text

    def _mark(self, text: str) -> str:
        if text not in self._texts:
            self._texts.append(text)
        return f"{_OPEN}{self._guard._secret}m{self._texts.index(text):x}{_CLOSE}"

    def _protect_text(self, text: str, trusted: bool) -> str:
        guard = self._guard
        allow = self._allow if trusted else frozenset()
        text = guard._pattern.sub(lambda match: match[0] if match[0] in allow else self._mark(match[0]), text)
        # A message may also end in the first half of a spelling and count on the template, or the next message, for the rest.
        body = text.strip()
        if not body:
            return text
        start = text.index(body)
        head = next((n for n in range(min(guard._longest, len(body)), 0, -1) if body[:n] in guard._tails), 0)
        rest = body[head:]
        tail = next((n for n in range(min(guard._longest, len(rest)), 0, -1) if rest[len(rest) - n:] in guard._heads), 0)
        middle = rest[: len(rest) - tail]
        return "".join((
            text[:start],
            self._mark(body[:head]) if head else "",
            middle,
            self._mark(rest[len(rest) - tail:]) if tail else "",
            text[start + len(body):],
        ))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of `text` and nothing else; TokenizerError for lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])  # what Python makes of a byte that is no text is told as that byte
        culprit = f"the byte 0x{code - 0xDC00:02X}" if 0xDC80 <= code < 0xDD00 else f"half a character, U+{code:04X}"
        raise TokenizerError(f"the text is not valid Unicode: it holds {culprit}") from error
    try:
        return tokenizer.encode(text, add_special_tokens=False).ids
    except Exception as error:  # the library raises plain Exception, for a text its vocabulary cannot spell
        raise TokenizerError(f"the model's tokenizer refuses the text: {error}") from error


def _renamed_tokenizer(tokenizer_json: str, names: dict[str, str]) -> Tokenizer:
    data = json.loads(tokenizer_json)
    model = data["model"]
    for token in data.get("added_tokens") or ():
        token["content"] = names.get(token["content"], token["content"])
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): token for text, token in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _makes(merge, names)]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    data.update(post_processor=None, truncation=None, padding=None)  # they name tokens, and add what the template has already
    try:
        return Tokenizer.from_str(json.dumps(data))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"the tokenizer cannot keep users' text apart: {error}") from error


def _makes(merge: Any, names: dict[str, str]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left + right in names or left in names or right in names
