# SPDX-License-Identifier: Apache-2.0
"""Chat templates: the model's own Jinja text, in Jinja's sandbox, with the helpers such templates expect."""
from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from .errors import InvalidError, TemplateError


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012  (Jinja wants a set on the class)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes <, > and &, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A compiled template.

    source          Jinja text
    special_tokens  names such as bos_token and their spellings, visible to the template
    """

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.source = source
        self._variables = {name: value.get("content") if isinstance(value, dict) else value for name, value in special_tokens.items()}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template is not usable: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of `messages`. TemplateError with the template's own words if it refuses them."""
        fixed = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        taken = sorted(fixed.keys() & (variables or {}).keys())
        if taken:
            raise InvalidError(f"variables cannot replace {taken[0]!r}")
        try:
            return self._template.render({**self._variables, **(variables or {}), **fixed})
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template refuses these messages: {error}") from error
        except MemoryError:
            raise
        except Exception as error:  # template code can raise anything its expressions can
            raise TemplateError(f"the model's chat template fails on these messages: {type(error).__name__}: {error}") from error
