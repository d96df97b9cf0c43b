"""JSON schemas of the routes' answers with 200, for /openapi.json. Closed: a field that is not here is in no answer."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}
LOGPROB: Schema = {"type": "number", "maximum": 0}


def closed(optional: Schema | None = None, /, **required: Schema) -> Schema:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": sorted(required),
        "additionalProperties": False,
    }


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def one_of(*values: str | None) -> Schema:
    return {"enum": list(values)}


_USAGE = closed(
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=closed(cached_tokens=COUNT),
)
_MILLISECONDS = nullable({"type": "number", "minimum": 0})
_TIMELINE: Schema = array(
    closed(
        index=COUNT,
        route=nullable(STRING),
        policy=one_of("always", "never", "auto", None),
        fallback=nullable(STRING),
        route_ms=_MILLISECONDS,
        reserve_ms=_MILLISECONDS,
        prefill_queue_ms=_MILLISECONDS,
        prefill_ms=_MILLISECONDS,
        transfer_ms=_MILLISECONDS,
        decode_queue_ms=_MILLISECONDS,
        first_step_ms=_MILLISECONDS,
        first_token_ms=_MILLISECONDS,
        total_ms=_MILLISECONDS,
    )
)


def _answer(kind: str, choice: Schema) -> Schema:
    return closed(
        {"kvrelay_timeline": _TIMELINE},
        id=STRING,
        object=one_of(kind),
        created=COUNT,
        model=STRING,
        choices={**array(choice), "minItems": 1},
        usage=_USAGE,
    )


_COMPLETION_LOGPROBS = closed(
    tokens=array(STRING),
    token_logprobs=array(nullable(LOGPROB)),
    top_logprobs=array(nullable({"type": "object", "additionalProperties": LOGPROB})),
    text_offset=array(COUNT),
)
_TOKEN: Schema = {"token": STRING, "logprob": LOGPROB, "bytes": nullable(array({**COUNT, "maximum": 255}))}
_CHAT_LOGPROBS = closed(content=array(closed(**_TOKEN, top_logprobs=array(closed(**_TOKEN)))), refusal=NULL)
_CALL = closed(id=STRING, type=one_of("function"), function=closed(name=STRING, arguments=STRING))
_MESSAGE = closed({"tool_calls": array(_CALL)}, role=one_of("assistant"), content=nullable(STRING), refusal=NULL)
_MODEL = closed(id=STRING, object=one_of("model"), created=COUNT, owned_by=STRING, max_model_len=COUNT)

_ERROR = closed(message=STRING, type=STRING, param=nullable(STRING), code=nullable(STRING))
ERROR = closed(error=_ERROR)

COMPLETION = _answer(
    "text_completion",
    closed(index=COUNT, text=STRING, logprobs=nullable(_COMPLETION_LOGPROBS), finish_reason=one_of("stop", "length")),
)
CHAT_COMPLETION = _answer(
    "chat.completion",
    closed(
        index=COUNT,
        message=_MESSAGE,
        logprobs=nullable(_CHAT_LOGPROBS),
        finish_reason=one_of("stop", "length", "tool_calls"),
    ),
)


def _events(kind: str, choice: Schema) -> Schema:
    """Each event of a stream. OpenAPI before 3.2 has no other place for it than the content's schema."""
    chunk = closed(
        {"kvrelay_timeline": _TIMELINE, "usage": nullable(_USAGE)},
        id=STRING,
        object=one_of(kind),
        created=COUNT,
        model=STRING,
        choices=array(choice),
    )
    json = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": [chunk, ERROR]}}
    data = {"if": {"const": "[DONE]"}, "else": json}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


_PART = closed({"id": STRING, "type": one_of("function")}, index=COUNT, function=closed({"name": STRING}, arguments=STRING))
_DELTA = closed(
    {"role": one_of("assistant"), "content": nullable(STRING), "refusal": NULL, "tool_calls": array(_PART)},
)
ANSWERS: dict[tuple[str, str], Schema] = {
    ("/v1/completions", "post"): COMPLETION,
    ("/v1/chat/completions", "post"): CHAT_COMPLETION,
    ("/v1/models", "get"): closed(object=one_of("list"), data=array(_MODEL)),
    ("/v1/models/{model_id}", "get"): _MODEL,
    ("/tokenize", "post"): closed(tokens=array(COUNT), count=COUNT, max_model_len=COUNT),
    ("/detokenize", "post"): closed(prompt=STRING),
    ("/health", "get"): closed(status=one_of("ok"), ready=BOOLEAN),
    ("/ready", "get"): closed(status=one_of("ready")),
    ("/cluster", "get"): {"type": "object"},
}
EVENTS: dict[tuple[str, str], Schema] = {
    ("/v1/completions", "post"): _events(
        "text_completion",
        closed(
            index=COUNT, text=STRING, logprobs=nullable(_COMPLETION_LOGPROBS), finish_reason=one_of("stop", "length", None)
        ),
    ),
    ("/v1/chat/completions", "post"): _events(
        "chat.completion.chunk",
        closed(
            index=COUNT,
            delta=_DELTA,
            logprobs=nullable(_CHAT_LOGPROBS),
            finish_reason=one_of("stop", "length", "tool_calls", None),
        ),
    ),
}


def content_of(path: str, method: str) -> Schema:
    """An answer's forms by media type."""
    answer, events = ANSWERS.get((path, method)), EVENTS.get((path, method))
    if answer is None:
        return {"text/plain": {"schema": STRING}}
    content: Schema = {"application/json": {"schema": answer}}
    return content if events is None else {**content, "text/event-stream": {"schema": events}}
