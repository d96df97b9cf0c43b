"""What /openapi.json says of bodies and answers: handlers read and write them themselves, so FastAPI cannot know."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from coordinator.api.answer_schemas import ERROR, content_of
from coordinator.api.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_ERRORS = {
    "400": "the body, or a field of it",
    "401": "no valid API key",
    "403": "a header that is not allowed here",
    "404": "an unknown model, or path",
    "405": "a method that the path does not take",
    "408": "a deadline has passed",
    "413": "the body is too large",
    "415": "the body is not JSON",
    "429": "too many requests; see Retry-After",
    "500": "the server failed",
    "503": "may be tried again; see Retry-After",
}
_TEXT: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/TextPart"}},
    ]
}


def install_openapi(app: FastAPI, model_name: str, vocab_size: int, max_choices: int) -> None:
    """Make /openapi.json describe request bodies, answers and errors."""
    made: dict[str, Any] = {}

    def describe() -> dict[str, Any]:
        if not made:
            made.update(_described(app, model_name, vocab_size, max_choices))
        return made

    app.openapi = describe  # type: ignore[method-assign]


def _described(app: FastAPI, model_name: str, vocab_size: int, max_choices: int) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas["Error"] = ERROR
    for path, model in _BODIES.items():
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        parts = schema.pop("$defs", {})
        if "ChatMessage" in parts:
            parts["ChatMessage"] = _message(parts["ChatMessage"]["properties"])
        schemas.update(parts)
        if model is CompletionRequest:
            schema["properties"]["prompt"] = _prompt(vocab_size)
        if "n" in schema["properties"]:
            schema["properties"]["n"]["maximum"] = max_choices
        schema["properties"]["model"] = {"type": "string", "enum": [model_name]}
        schemas[model.__name__] = schema
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
        document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    one_model = document["paths"]["/v1/models/{model_id}"]["get"]
    one_model["parameters"] = [{"name": "model_id", "in": "path", "required": True, "schema": {"enum": [model_name]}}]
    failure = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            responses = operation["responses"]
            responses.pop("422", None)
            responses["200"] = {"description": "the answer", "content": content_of(path, method)}
            for status, words in _ERRORS.items():
                responses[status] = {"description": words, "content": failure}
    document["paths"]["/ready"]["get"]["responses"]["503"] = {"description": "no request could be served now"}
    document["paths"]["/health"]["get"]["responses"]["503"] = {"description": "the coordinator does not hold together"}
    return document


def _prompt(vocab_size: int) -> dict[str, Any]:
    text = {"type": "string", "minLength": 1}
    ids = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}}
    lists = [{"type": "array", "minItems": 1, "items": item} for item in (text, ids)]
    return {"anyOf": [text, ids, *lists]}


def _message(fields: dict[str, Any]) -> dict[str, Any]:
    """Which fields belong to which role; pydantic checks that behind the types, where its own schema does not show it."""
    name, calls, call_id = fields["name"], fields["tool_calls"], {"type": "string", "minLength": 1, "maxLength": 128}

    def of_role(*roles: str, **required: Any) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"role": {"enum": list(roles)}, "name": name, **required},
            "required": ["role", *required],
            "additionalProperties": False,
        }

    calling = of_role("assistant", tool_calls={**calls["anyOf"][0], "minItems": 1})
    calling["properties"]["content"] = {"anyOf": [*_TEXT["anyOf"], {"type": "null"}]}
    return {
        "anyOf": [
            of_role("system", "developer", "user", "assistant", content=_TEXT),
            calling,
            of_role("tool", content=_TEXT, tool_call_id=call_id),
        ]
    }
