"""Request bodies: types and ranges. Strict: a boolean is no integer, `1.0` is no integer, `"1"` is no number.

`null` at the top level or in a message acts as absent. A field that OpenAI has and kvrelay has not is refused by name,
unless its value asks for nothing (`tools: []`); a field that nobody knows is refused by name too, since a silently dropped
one gives wrong answers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from coordinator.api.errors import bad_request, from_validation_error

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _str_or_list(value: Any) -> str | None:
    return "<str>" if isinstance(value, str) else "<list>" if isinstance(value, list) else None


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: Annotated[bool | None, Field(json_schema_extra={"enum": [False, None]})] = None  # true is refused


StopString = Annotated[str, Field(min_length=1, max_length=1024)]


class GenerationFields(_Strict):
    """What both generating routes take. Ranges are OpenAI's; those behind `user` are extensions."""

    model: str
    n: Annotated[int, Field(ge=1)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: (
        Annotated[
            Annotated[StopString, Tag("<str>")] | Annotated[Annotated[list[StopString], Field(max_length=4)], Tag("<list>")],
            Discriminator(_str_or_list),
        ]
        | None
    ) = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)] = {}
    seed: Annotated[int, Field(ge=_INT64_MIN, le=_INT64_MAX)] | None = None
    user: str | None = None  # accepted, not used

    top_k: Annotated[int, Field(ge=-1)] = 0  # 0 and -1: off; more than the vocabulary: all of it
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[int], Field(max_length=128)] = []
    include_stop_str_in_output: bool = False
    regex: str | None = None  # the whole output matches it
    grammar: str | None = None  # llguidance's Lark, or GBNF
    timeout: Annotated[float, Field(gt=0, le=86_400)] | None = None  # seconds for all of the request
    priority: Annotated[int, Field(ge=-100, le=100)] = 0  # lower is earlier
    cache_salt: Annotated[str, Field(max_length=256)] = ""  # cached KV is shared only within one salt


class CompletionRequest(GenerationFields):
    prompt: Any  # checked by request_builder: four shapes, and lists of many thousand ids
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool = False
    best_of: Annotated[int, Field(ge=0, le=20)] | None = None


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class CalledFunction(_Strict):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    arguments: str  # JSON text


class ToolCall(_Strict):
    id: Annotated[str, Field(min_length=1, max_length=128)]
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            Annotated[str, Tag("<str>")] | Annotated[Annotated[list[TextPart], Field(min_length=1)], Tag("<list>")],
            Discriminator(_str_or_list),
        ]
        | None
    ) = None  # an assistant that calls tools needs none
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None


class FunctionTool(_Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class Tool(_Strict):
    type: Literal["function"]
    function: FunctionTool


class ChosenFunction(_Strict):
    name: str


class NamedToolChoice(_Strict):
    type: Literal["function"]
    function: ChosenFunction


def _str_or_object(value: Any) -> str | None:
    return "<str>" if isinstance(value, str) else "<object>" if isinstance(value, dict) else None


class JsonSchemaFormat(_Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None  # accepted: the output always follows the schema


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class ChatRequest(GenerationFields):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=16384)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] = []
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("<str>")] | Annotated[NamedToolChoice, Tag("<object>")],
            Discriminator(_str_or_object),
        ]
        | None
    ) = None
    parallel_tool_calls: bool = True
    safety_identifier: str | None = None  # accepted, not used
    prompt_cache_key: str | None = None  # accepted, not used: prefixes are found by content


class TokenizeRequest(_Strict):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=16384)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(_Strict):
    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False


# OpenAI's fields that are not offered → values that ask for nothing. `null` is always one.
REFUSED_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {"suffix": ("",)}
REFUSED_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    "moderation": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
}
_REFUSED_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    "function_call": (),
    "audio": (),
    "annotations": ([],),
    "refusal": ("",),
}

_Request = TypeVar("_Request", bound=BaseModel)


def validate(schema: type[_Request], body: dict[str, Any], refused: dict[str, tuple[Any, ...]] | None = None) -> _Request:
    """
    Raises:
        ApiError: 400 that names the field.
    """
    fields = _offered(body, refused or {}, "")
    messages = fields.get("messages")
    if isinstance(messages, list):
        fields["messages"] = [
            _offered(message, _REFUSED_IN_MESSAGES, f"messages[{index}].") if isinstance(message, dict) else message
            for index, message in enumerate(messages)
        ]
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        raise from_validation_error(error) from error


def _offered(fields: dict[str, Any], refused: dict[str, tuple[Any, ...]], path: str) -> dict[str, Any]:
    kept = {name: value for name, value in fields.items() if value is not None}
    for name, harmless in refused.items():
        if name not in kept:
            continue
        value = kept.pop(name)
        if not any(type(value) is type(other) and value == other for other in harmless):
            raise bad_request(
                f"{path}{name} is not offered by this server", param=f"{path}{name}", code="unsupported_parameter"
            )
    return kept
