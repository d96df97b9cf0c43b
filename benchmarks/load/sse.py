"""Server-sent events of an OpenAI-compatible stream: bytes in, events out, no I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

MAX_EVENT_BYTES = 4 * 2**20


class BrokenStream(Exception):
    """What came is no stream of events, or holds an error; the message is the server's."""


class StreamEvent(msgspec.Struct, frozen=True):
    """`text` is empty for events without output: a role, a finish, usage."""

    text: str = ""
    finished: bool = False
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    timeline: dict[str, Any] | None = None
    done: bool = False  # the stream's own end mark


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    kvrelay_timeline: list[dict[str, Any]] | None = None


class EventParser:
    """Feed it what the socket gives; it keeps the incomplete end."""

    def __init__(self) -> None:
        self._rest = b""
        self._decoder = msgspec.json.Decoder(_Chunk)

    def push(self, data: bytes) -> Iterator[StreamEvent]:
        """
        Raises:
            BrokenStream
        """
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise BrokenStream(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                yield self._event(line[5:].strip())

    def _event(self, payload: bytes) -> StreamEvent:
        if payload == b"[DONE]":
            return StreamEvent(done=True)
        try:
            chunk: _Chunk = self._decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise BrokenStream(f"an event cannot be read: {error}") from error
        if chunk.error is not None:
            raise BrokenStream(_error_text(chunk.error))
        text = "".join(_text_of(choice) for choice in chunk.choices)
        usage = chunk.usage or _Usage()
        details = usage.prompt_tokens_details
        return StreamEvent(
            text=text,
            finished=any(choice.finish_reason for choice in chunk.choices),
            prompt_tokens=usage.prompt_tokens if chunk.usage else None,
            output_tokens=usage.completion_tokens if chunk.usage else None,
            cached_tokens=details.cached_tokens if details else None,
            timeline=chunk.kvrelay_timeline[0] if chunk.kvrelay_timeline else None,
        )


def _text_of(choice: _Choice) -> str:
    if choice.delta is not None:
        return (choice.delta.content or "") + (choice.delta.reasoning_content or "")
    return choice.text or ""


def _error_text(error: Any) -> str:
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(error)
