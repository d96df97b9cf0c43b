"""A request's body to a JSON object, distrusting every byte.

Checked in this order: content type (415), encoding (415), size (413, before anything is parsed), time (408), UTF-8, JSON,
duplicate keys, numbers that are none, nesting, lone surrogates, and that it is an object (400).
"""

from __future__ import annotations

import asyncio
import json
from email.message import Message
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from coordinator.api.errors import ApiError, ClientGone, bad_request


async def read_json_object(request: Request, max_bytes: int, timeout_s: float) -> tuple[dict[str, Any], int]:
    """
    Returns:
        The object, and the body's size in bytes.

    Raises:
        ApiError: the body is not an acceptable JSON object.
        ClientGone: the client left before its body was complete.
    """
    _check_headers(request)
    try:
        async with asyncio.timeout(timeout_s):
            body = await _read(request, max_bytes)
    except TimeoutError as error:
        raise ApiError(408, f"The body was not complete within {timeout_s:g} seconds.", code="request_timeout") from error
    except ClientDisconnect as error:
        raise ClientGone from error
    value = parse_json(body)
    if not isinstance(value, dict):
        raise bad_request("The body must be a JSON object.")
    return value, len(body)


def parse_json(body: bytes) -> Any:
    """
    Raises:
        ApiError: 400, with the position where that helps, and nothing of the body.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_request(f"The body is not valid UTF-8 (byte {error.start}).") from error
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise bad_request(f"The body is not valid JSON: {error.msg} at character {error.pos}.") from error
    except RecursionError as error:
        raise bad_request("The body's JSON is nested too deeply.") from error
    except ValueError as error:  # an integer with more digits than Python converts
        raise bad_request("The body's JSON holds a number that is too large.") from error
    if "\\ud" in text or "\\uD" in text:  # only an escape can smuggle half of a surrogate pair past UTF-8
        _refuse_lone_surrogates(value)
    return value


def _check_headers(request: Request) -> None:
    header = Message()
    header["content-type"] = request.headers.get("content-type", "")
    kind = header.get_content_type() if request.headers.get("content-type") else ""
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, "Content-Type must be application/json.", code="unsupported_media_type")
    if (header.get_content_charset() or "utf-8") not in ("utf-8", "utf8"):
        raise ApiError(415, "The charset must be utf-8.", code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").lower() not in ("identity", ""):
        raise ApiError(415, "Content-Encoding is not supported.", code="unsupported_media_type")


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = ApiError(413, f"The body is larger than {max_bytes} bytes.", code="request_too_large")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdecimal() and (len(length) > 18 or int(length) > max_bytes):
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise bad_request("The body's JSON names the same key twice.")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise bad_request("The body is not valid JSON: NaN and Infinity are not numbers.")


def _refuse_lone_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise bad_request("The body's JSON holds half of a surrogate pair.") from error
    except RecursionError as error:
        raise bad_request("The body's JSON is nested too deeply.") from error
