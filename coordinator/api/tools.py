"""What a chat request says of tools: which may be called, whether one must be, and how the model's family writes calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coordinator.api.errors import bad_request
from coordinator.api.schemas import ChatRequest, NamedToolChoice
from coordinator.chat_template import ChatTemplate
from coordinator.tool_formats import ToolStyle, forced_calls, style_of


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`offered`: what the prompt shows, as JSON. `callable_`: the functions of which a forced call must be one."""

    style: ToolStyle
    offered: tuple[dict[str, Any], ...]
    callable_: tuple[dict[str, Any], ...]
    forced: bool
    several: bool

    def grammar(self) -> str:
        return forced_calls(self.callable_, self.style.format, self.several)


def tool_use(request: ChatRequest, template: ChatTemplate | None) -> ToolUse | None:
    """None: no tools are in play.

    Raises:
        ApiError: 400 that names the field.
    """
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools", param="tool_choice")
        return None
    names = [tool.function.name for tool in request.tools]
    if len(set(names)) != len(names):
        raise bad_request("tools: two functions have the same name", param="tools")
    if choice == "none" or template is None:
        return None  # without a template, chat is refused anyway
    style = style_of(template)
    offered = tuple(tool.model_dump(exclude_none=True) for tool in request.tools)
    functions = tuple(tool["function"] for tool in offered)
    named = isinstance(choice, NamedToolChoice)
    if isinstance(choice, NamedToolChoice):
        functions = tuple(function for function in functions if function["name"] == choice.function.name)
        if not functions:
            raise bad_request("tool_choice names a function that is not in tools", param="tool_choice")
    forced = named or choice == "required"
    if not forced and any(tool.function.strict for tool in request.tools):
        raise bad_request(
            "strict functions need tool_choice required or a named one", param="tools", code="unsupported_parameter"
        )
    if not forced and not style.known:
        raise bad_request(
            "this model's chat template writes tool calls in a form that is not known here; tool_choice required, or a "
            "named function, works",
            param="tools",
            code="unsupported_parameter",
        )
    several = not named and request.parallel_tool_calls
    return ToolUse(style, offered, functions, forced, several)
