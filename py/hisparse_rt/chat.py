# SPDX-License-Identifier: Apache-2.0
"""Messages to token ids."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import InvalidError, TemplateError
from .template import ChatTemplate
from .tokenizer import TextCodec

Message: TypeAlias = Mapping[str, Any]
"""{"role": "system" | "user" | "assistant" | ..., "content": text, ...}; content may also be a list of {"type": "text", "text": ...}"""


def as_messages(messages: str | Sequence[Message], system: str | None = None, history: Sequence[Message] | None = None) -> list[Message]:
    """One list out of a user's text or a list of messages, a system prompt in front and earlier messages between them."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    elif not isinstance(messages, Sequence) or isinstance(messages, bytes):
        raise TypeError(f"a chat takes a text or a list of messages, not {type(messages).__name__}")
    turns = [_checked(position, turn) for position, turn in enumerate([*(history or ()), *messages])]
    if system is not None:
        if turns and turns[0]["role"] == "system":
            raise InvalidError("two system prompts: give system=, or a message with the role system, not both")
        turns.insert(0, _checked(0, {"role": "system", "content": system}))
    if not turns:
        raise InvalidError("no messages: chat needs at least one")
    return turns


def _checked(position: int, turn: Any) -> Message:
    """A message with a role, and text as its content. Templates would put anything else into the text as Python spells it."""
    if not isinstance(turn, Mapping):
        raise TypeError(f"message {position} is a {type(turn).__name__}, not a dict with role and content")
    if not isinstance(turn.get("role"), str):
        raise InvalidError(f"message {position} has no role")
    content = turn.get("content")
    if content is None:
        if "tool_calls" not in turn:
            raise InvalidError(f"message {position} has no content")
        return turn
    if isinstance(content, (list, tuple)):
        return {**turn, "content": "\n".join(_part_text(position, part) for part in content)}
    if not isinstance(content, str):
        raise TypeError(f"the content of message {position} is a {type(content).__name__}, not text")
    return turn


def _part_text(position: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise InvalidError(f"message {position} has a part of type {kind!r}; only parts of type 'text' are possible")
    return str(part["text"])


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
    if variables is not None and not isinstance(variables, Mapping):
        raise TypeError(f"variables must be a dict of names for the template, not {type(variables).__name__}")
    texts = codec.guard.message_texts(allow=codec.template_words)
    safe = [texts.protect(dict(message), trusted=message["role"] == "assistant") for message in messages]
    rendered = template.render(
        safe, tools=texts.protect(tools), add_generation_prompt=add_generation_prompt, variables=texts.protect(dict(variables or {}))
    )
    ids = texts.encode(rendered)
    if not ids:
        raise TemplateError("the model's chat template makes nothing of these messages")
    return codec.checked(codec.with_prefix(ids))


def chat_text(codec: TextCodec, template: ChatTemplate, messages: Sequence[Message], **options: Any) -> str:
    """What the template makes of `messages`, to look at. Use `chat_ids` for the model."""
    return template.render(messages, **options)
