# SPDX-License-Identifier: Apache-2.0
"""Text to ids and back, with the tokenizer.json inside a model file."""
from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from .errors import TokenError, TokenizerError
from .guard import Guard, encode
from .ids import as_ids
from .text import Detokenizer


class TextCodec:
    """The tokenizer of a model.

    tokenizer_json  the tokenizer.json
    vocab_size      ids from here on do not exist for the model
    bos             the begin token's id, or None
    eos             ids that end a text; control tokens even if the tokenizer does not call them special
    template        the chat template's source, or None: tokens it spells out are control tokens too
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, bos: int | None, eos: Sequence[int], template: str | None) -> None:
        self._json = tokenizer_json
        try:
            self.tokenizer = Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"the model's tokenizer does not load: {error}") from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self._vocab_size = vocab_size
        self._bos = bos
        added = self.tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        self._controls = {
            token: entry.content
            for token, entry in added.items()
            if entry.special or token in eos or (template and not entry.content.isspace() and entry.content in template)
        }
        self.prefix = self._find_prefix()

    def encode(self, text: str, *, prefix: bool = True, special: bool = True) -> npt.NDArray[np.int32]:
        """Ids of `text`.

        prefix   put the tokens in front that the tokenizer wants there (a begin token, if any), once
        special  True: control tokens spelled in the text become control tokens; False: they stay text
        Raises TokenizerError for text that is no valid Unicode, TokenError for an id the model has no row for.
        """
        if not isinstance(text, str):
            raise TypeError(f"expected text, not {type(text).__name__}")
        ids = encode(self.tokenizer, text) if special else self.guard.encode_text(text)
        return self.checked(self.with_prefix(ids) if prefix else ids)

    def with_prefix(self, ids: list[int]) -> list[int]:
        """`ids` with the tokenizer's begin tokens in front, unless the text brought its own."""
        if self.prefix and ids[:1] == self.prefix[:1]:
            return ids
        return self.prefix + ids

    def checked(self, ids: list[int]) -> npt.NDArray[np.int32]:
        """`ids` as an array; TokenError if one of them is not in the model."""
        array = np.array(ids, dtype=np.int32)
        if array.size and int(array.max()) >= self._vocab_size:
            token = int(array.max())
            raise TokenError(
                f"the text needs token {token} ({self.tokenizer.id_to_token(token)!r}), but the model has only {self._vocab_size} rows"
            )
        return array

    def decode(self, ids: Any, *, skip_special: bool = True) -> str:
        """Text of `ids`; control tokens are left out unless skip_special is False."""
        array = as_ids(ids)
        if array.size and int(array.max()) >= self._vocab_size:
            raise TokenError(f"token {int(array.max())} is not in the model, which has {self._vocab_size} rows")
        return str(self.tokenizer.decode(array.tolist(), skip_special_tokens=skip_special))

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder."""
        return Detokenizer(self.tokenizer.decode, self._special, self._byte_ids)

    @functools.cached_property
    def guard(self) -> Guard:
        """The tokenizer for text that must not speak in control tokens."""
        return Guard(self._json, self._controls)

    @functools.cached_property
    def template_words(self) -> frozenset[str]:
        """Tokens such as <think> that templates look for in an assistant's message: control tokens, but not special ones."""
        return frozenset(text for token, text in self._controls.items() if token not in self._special)

    @functools.cached_property
    def _byte_ids(self) -> frozenset[int]:
        decoder = self.tokenizer.decoder
        if decoder is None or '"ByteFallback"' not in _state(decoder):
            return frozenset()
        ids = (self.tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(token for token in ids if token is not None)

    def _find_prefix(self) -> list[int]:
        try:
            plain = self.tokenizer.encode("a", add_special_tokens=False).ids
            full = self.tokenizer.encode("a", add_special_tokens=True).ids
        except Exception:  # what the library raises for letters that its vocabulary cannot spell
            plain, full = [], self.tokenizer.encode("", add_special_tokens=True).ids
        for start in range(len(full) - len(plain) + 1):
            if plain and full[start:start + len(plain)] == plain:
                return full[:start]
        return [] if plain or self._bos not in full else [self._bos]


def _state(part: Any) -> str:
    state = part.__getstate__()
    return state.decode() if isinstance(state, bytes) else json.dumps(state)
