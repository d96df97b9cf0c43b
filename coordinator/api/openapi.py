"""What /openapi.json says of the bodies: handlers read them themselves, so FastAPI cannot know."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

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
_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_PROMPT: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        {
            "type": "array",
            "minItems": 1,
            "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        },
    ]
}


def install_openapi(app: FastAPI, model_name: str) -> None:
    """Make /openapi.json describe request bodies and errors."""
    made: dict[str, Any] = {}

    def describe() -> dict[str, Any]:
        if not made:
            made.update(_described(app, model_name))
        return made

    app.openapi = describe  # type: ignore[method-assign]


def _described(app: FastAPI, model_name: str) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas["Error"] = _ERROR_SCHEMA
    for path, model in _BODIES.items():
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        if model is CompletionRequest:
            schema["properties"]["prompt"] = _PROMPT
        schema["properties"]["model"] = {"type": "string", "enum": [model_name]}
        schemas[model.__name__] = schema
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
        document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    one_model = document["paths"]["/v1/models/{model_id}"]["get"]
    one_model["parameters"] = [{"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}]
    failure = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for methods in document["paths"].values():
        for operation in methods.values():
            responses = operation["responses"]
            responses.pop("422", None)
            responses["200"] = {"description": "the answer"}
            for status, words in _ERRORS.items():
                responses[status] = {"description": words, "content": failure}
    document["paths"]["/ready"]["get"]["responses"]["503"] = {"description": "no request could be served now"}
    document["paths"]["/health"]["get"]["responses"]["503"] = {"description": "the coordinator does not hold together"}
    return document
