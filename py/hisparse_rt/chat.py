# SPDX-License-Identifier: Apache-2.0
"""Messages to token ids."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import InvalidError
from .template import ChatTemplate
from .tokenizer import TextCodec

Message: TypeAlias = Mapping[str, Any]
"""{"role": "system" | "user" | "assistant" | ..., "content": text, ...}"""


def as_messages(messages: str | Sequence[Message], system: str | None = None, history: Sequence[Message] | None = None) -> list[Message]:
    """One list out of a user's text or a list of messages, a system prompt in front and earlier messages between them."""
    if isinstance(messages, str):
        turns: list[Message] = [{"role": "user", "content": messages}]
    else:
        turns = list(messages)
    turns = [*(history or ()), *turns]
    if system is not None:
        if turns and turns[0].get("role") == "system":
            raise InvalidError("two system prompts: give system=, or a message with the role system, not both")
        turns.insert(0, {"role": "system", "content": system})
    if not turns:
        raise InvalidError("no messages: chat needs at least one")
    for position, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise TypeError(f"message {position} is a {type(turn).__name__}, not a dict with role and content")
        if not isinstance(turn.get("role"), str):
            raise InvalidError(f"message {position} has no role")
        if "content" not in turn and "tool_calls" not in turn:
            raise InvalidError(f"message {position} has no content")
    return turns


def chat_ids(
    codec: TextCodec,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> npt.NDArray[np.int32]:
    """Token ids of `messages` in the model's template. Control tokens spelled inside messages stay ordinary text."""
    texts = codec.guard.message_texts(allow=codec.template_words)
    safe = [texts.protect(dict(message), trusted=message["role"] == "assistant") for message in messages]
    rendered = template.render(
        safe, tools=texts.protect(tools), add_generation_prompt=add_generation_prompt, variables=texts.protect(dict(variables or {}))
    )
    return codec.checked(codec.with_prefix(texts.encode(rendered)))


def chat_text(codec: TextCodec, template: ChatTemplate, messages: Sequence[Message], **options: Any) -> str:
    """What the template makes of `messages`, to look at. Use `chat_ids` for the model."""
    return template.render(messages, **options)
