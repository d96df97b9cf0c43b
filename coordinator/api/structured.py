"""Which grammar a request asks for: `response_format`, the extensions `regex` and `grammar`, and forced tool calls."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.api.errors import ApiError, bad_request
from coordinator.api.schemas import ChatRequest, GenerationFields
from coordinator.api.tools import ToolUse
from coordinator.grammars import BadGrammar, GrammarChecker, from_json_schema, from_lark, from_regex
from coordinator.text_model import TextModel

_Wish = tuple[str, Callable[[], str]]  # the field's name, and what makes the grammar of it


async def grammar_for(
    request: GenerationFields, checker: GrammarChecker, text: TextModel, tools: ToolUse | None = None
) -> str:
    """The checked grammar; empty if any text will do.

    Raises:
        ApiError: 400 that names the field.
    """
    wishes = _wishes(request, tools)
    if not wishes:
        return ""
    if len(wishes) > 1:
        names = " and ".join(param for param, _ in wishes)
        raise bad_request(f"{names} cannot be combined", param=wishes[1][0])
    param, make = wishes[0]
    for name, given in (
        ("ignore_eos", request.ignore_eos),
        ("min_tokens", request.min_tokens),
        ("stop_token_ids", request.stop_token_ids),
    ):
        if given:
            raise bad_request(f"{name} cannot be combined with {param}, which alone says where the output ends", param=name)
    if not text.eos_token_ids:
        raise bad_request(f"{param} needs a model with an end token", param=param, code="unsupported_parameter")
    try:
        return await checker.checked(make)
    except BadGrammar as error:
        raise invalid_grammar(param, str(error)) from error


def invalid_grammar(param: str, reason: str) -> ApiError:
    return bad_request(f"{param} cannot be used: {reason}", param=param, code="invalid_grammar")


def _wishes(request: GenerationFields, tools: ToolUse | None) -> list[_Wish]:
    wishes: list[_Wish] = []
    if request.regex is not None:
        regex = request.regex
        wishes.append(("regex", lambda: from_regex(regex)))
    if request.grammar is not None:
        source = request.grammar
        wishes.append(("grammar", lambda: from_lark(source)))
    if isinstance(request, ChatRequest) and request.response_format is not None:
        wished = request.response_format
        if wished.type == "json_object":
            wishes.append(("response_format", lambda: from_json_schema({"type": "object"})))
        elif wished.type == "json_schema":
            if wished.json_schema is None:
                raise bad_request("response_format.json_schema is required", param="response_format.json_schema")
            schema = wished.json_schema.schema_ if wished.json_schema.schema_ is not None else {}
            wishes.append(("response_format", lambda: from_json_schema(schema)))
        elif wished.json_schema is not None:
            raise bad_request("response_format.json_schema needs type json_schema", param="response_format.json_schema")
    if tools is not None and tools.forced:
        forced = tools
        wishes.append(("tool_choice", lambda: from_lark(forced.grammar())))
    return wishes
