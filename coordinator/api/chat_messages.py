"""A chat request's messages to what chat templates take.

`developer` is the newer name of `system`, which is what templates know. Text parts are joined as they are. Arguments of an
assistant's calls are JSON text in the API and an object in templates.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from coordinator.api.errors import bad_request
from coordinator.api.schemas import ChatMessage
from coordinator.api.tools import ToolUse
from coordinator.chat_template import ChatTemplate
from coordinator.tool_formats import described_messages


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """
    Raises:
        ApiError: 400 that names the message's field.
    """
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def rendered(
    template: ChatTemplate, messages: list[dict[str, Any]], add_generation_prompt: bool, tools: ToolUse | None
) -> str:
    """
    Raises:
        ChatTemplateError
    """
    if not template.uses_tools and (tools is not None or any(is_of_tools(message) for message in messages)):
        messages = described_messages(messages, tools.offered if tools is not None else ())
    offered = list(tools.offered) if tools is not None and template.uses_tools else None
    return template.render(messages, add_generation_prompt, offered)


def is_of_tools(message: dict[str, Any]) -> bool:
    return message["role"] == "tool" or "tool_calls" in message


def _plain(message: ChatMessage, path: str) -> dict[str, Any]:
    if message.tool_calls and message.role != "assistant":
        raise bad_request(f"{path}.tool_calls: only an assistant calls tools", param=f"{path}.tool_calls")
    if (message.tool_call_id is not None) is not (message.role == "tool"):
        words = "is required" if message.role == "tool" else "is for the role tool alone"
        raise bad_request(f"{path}.tool_call_id {words}", param=f"{path}.tool_call_id")
    if message.content is None and not message.tool_calls:
        raise bad_request(f"{path}.content is required", param=f"{path}.content")
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content or ""}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, f"{path}.tool_calls[{index}].function.arguments"),
                },
            }
            for index, call in enumerate(message.tool_calls)
        ]
    return plain


def _arguments(text: str, path: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise bad_request(f"{path} must be a JSON object, as text", param=path)
    return value
