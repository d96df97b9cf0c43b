"""How a model's template family writes tool calls: which family it is, the grammar that forces a call, and the prompt for
templates that know nothing of tools.

    hermes   <tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>, one for each call     (Hermes, Qwen)
    llama3   {"name": …, "parameters": {…}}, several separated by "; "                          (Llama 3)

A template that does not mention tools gets Hermes' form, described in the system turn in Qwen's words.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.chat_template import ChatTemplate

TOOL_CALL_TAGS = ("<tool_call>", "</tool_call>")
_NO_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}


class ToolFormat(enum.Enum):
    HERMES = "hermes"
    LLAMA3 = "llama3"

    @property
    def arguments_key(self) -> str:
        return "parameters" if self is ToolFormat.LLAMA3 else "arguments"


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """`known`: what the model writes by itself can be read. `described`: we, not the template, tell it of the tools."""

    format: ToolFormat
    known: bool
    described: bool


def style_of(template: ChatTemplate) -> ToolStyle:
    source = template.source
    if not template.uses_tools:
        return ToolStyle(ToolFormat.HERMES, known=True, described=True)
    if "<tool_call>" in source:
        return ToolStyle(ToolFormat.HERMES, known=True, described=False)
    if '"parameters": ' in source and ("ipython" in source or "<|python_tag|>" in source):
        return ToolStyle(ToolFormat.LLAMA3, known=True, described=False)
    return ToolStyle(ToolFormat.HERMES, known=False, described=False)


# -- forced calls -------------------------------------------------------------------------------------------------------


def forced_calls(functions: Sequence[Mapping[str, Any]], form: ToolFormat, several: bool) -> str:
    """A Lark grammar (llguidance's dialect) of one call, or of one or more, of any of `functions`."""
    rules = [
        f"body_{index}: %json {json.dumps(_call_schema(function, form), ensure_ascii=False)}"
        for index, function in enumerate(functions)
    ]
    bodies = " | ".join(f"body_{index}" for index in range(len(functions)))
    if form is ToolFormat.LLAMA3:
        start = 'start: call ("; " call)*' if several else "start: call"
        call = f"call: {bodies}"
    else:
        start = 'start: call ("\\n" call)*' if several else "start: call"
        call = f'call: "<tool_call>\\n" ({bodies}) "\\n</tool_call>"'
    return "\n".join([start, call, *rules])


def _call_schema(function: Mapping[str, Any], form: ToolFormat) -> dict[str, Any]:
    key = form.arguments_key
    parameters = function.get("parameters") or {"type": "object"}
    return {
        "x-guidance": _NO_SPACES,
        "type": "object",
        "properties": {"name": {"const": function["name"]}, key: _moved(parameters, f"#/properties/{key}")},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _moved(schema: Any, root: str) -> Any:
    """`schema` with its local references made right for its new place."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value[1:] if key == "$ref" and isinstance(value, str) and value.startswith("#") else _moved(value, root)
        for key, value in schema.items()
        if key != "x-guidance"
    }


# -- templates that know nothing of tools -------------------------------------------------------------------------------


def described_messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages without tools, calls or tool turns, which say the same in plain text."""
    plain = [_as_text(message) for message in messages]
    if not tools:
        return plain
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    said = (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{listed}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML "
        'tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{said}"}, *plain[1:]]
    return [{"role": "system", "content": said}, *plain]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    if calls := message.get("tool_calls"):
        texts = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
        return {"role": message["role"], "content": "\n".join([*([content] if content else []), *texts])}
    return dict(message)
