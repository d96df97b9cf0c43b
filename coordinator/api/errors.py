"""The one shape of an error: OpenAI's object with all of message, type, param and code, always as JSON.

ApiError      the request cannot be served as asked; raised anywhere below the front door
ClientGone    the client closed the connection; nobody reads an answer
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from coordinator.generation import GenerationError

INVALID = "invalid_request_error"


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type_: str = INVALID,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.type = type_
        self.headers = dict(headers or {})


class ClientGone(Exception):
    """The connection is closed; everything that runs for it must end."""


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def internal_error() -> ApiError:
    """Says nothing of what went wrong: that belongs into the log."""
    return ApiError(
        500, "The server had an error while processing the request.", type_="server_error", code="internal_error"
    )


def deadline_exceeded() -> ApiError:
    return ApiError(408, "The request's deadline has passed.", type_="timeout_error", code="deadline_exceeded")


def from_generation_error(error: GenerationError) -> ApiError:
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return ApiError(error.status, error.message, code=error.code, type_=error.type, headers=headers)


def error_object(error: ApiError) -> dict[str, object]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_response(error: ApiError) -> Response:
    return json_response(error_object(error), error.status, error.headers)


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(value),
        status_code=status,
        media_type="application/json",
        headers=dict(headers) if headers else None,
    )


# Our words for the kinds of error in which pydantic's would show a Python class name.
_WORDS = {
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be an array",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be a boolean",
    "missing": "is required",
    "union_tag_invalid": "has the wrong type",
    "union_tag_not_found": "has the wrong type",
}


_SHOULD_HAVE = re.compile(r"^(String|List|Dictionary) should have")
_UNION_TAGS = ("<str>", "<list>", "<object>")
_MAX_NAME_CHARS = 100  # of a field that nobody knows


def from_validation_error(error: ValidationError) -> ApiError:
    """The first problem, with its path as `param`; never the rejected value."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = path_of(first["loc"])
    if first["type"] == "extra_forbidden":
        *above, name = first["loc"]
        outer = path_of(tuple(above))
        param = f"{outer}.{name}"[: len(outer) + 1 + _MAX_NAME_CHARS] if outer else str(name)[:_MAX_NAME_CHARS]
        return bad_request(f"Unrecognized request argument: {param}", param=param, code="unknown_parameter")
    words = _WORDS.get(first["type"])
    if words is None:
        words = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        words = _SHOULD_HAVE.sub("must have", words).replace(" after validation,", ",")
    return bad_request(f"{param or 'The body'} {words}", param=param or None)


def path_of(loc: tuple[int | str, ...]) -> str:
    """``("messages", 0, "content")`` to ``messages[0].content``; union tags are no part of a path."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _UNION_TAGS:
            path += f".{part}" if path else part
    return path


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_request_validation_error)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; the status is for our own metrics


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: "There is nothing at this path.", 405: "This path does not take that method."}
    codes = {404: "not_found", 405: "method_not_allowed"}
    message = words.get(error.status_code, str(error.detail))
    return error_response(ApiError(error.status_code, message, code=codes.get(error.status_code), headers=error.headers))


async def _on_request_validation_error(request: Request, error: Exception) -> Response:
    return error_response(bad_request("The request's path or query is not valid."))
