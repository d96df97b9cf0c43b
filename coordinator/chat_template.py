"""Chat messages to a prompt, with the template that comes with the model.

Same environment as transformers' `apply_chat_template` (sandbox, trimmed blocks, loop controls, `generation` blocks,
`tojson` without HTML escapes, `raise_exception`, `strftime_now`), so that prompts are equal to the character.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]


class ChatTemplateError(Exception):
    """The template refused the messages, or failed on them. The text is fit for the client."""


class ChatTemplate:
    def __init__(
        self, source: str, special_tokens: Mapping[str, str], local_time: Callable[[], datetime] = datetime.now
    ) -> None:
        """
        Args:
            source: Jinja text.
            special_tokens: names such as ``bos_token`` to their text, visible to the template.
            local_time: what `strftime_now` formats; calendar time, never used to measure.

        Raises:
            ValueError: the template does not compile.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: local_time().strftime(pattern)
        self.source = source
        try:
            self._template = environment.from_string(source)
            self.uses_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """
        Raises:
            ChatTemplateError: the template raised, or cannot digest these messages.
        """
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise ChatTemplateError(
                f"the chat template refused the messages: {error.message or 'no reason given'}"
            ) from error
        except RecursionError as error:
            raise ChatTemplateError("the chat template nests too deeply for these messages") from error
        except Exception as error:  # a template is foreign code: whatever it trips over is about these messages
            raise ChatTemplateError("the chat template failed on these messages") from error


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it prints what is inside."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = jinja2.nodes.CallBlock(self.call_method("_inside"), [], [], body)
        block.set_lineno(line)
        return block

    def _inside(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
