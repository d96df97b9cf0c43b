"""How /v1/chat/completions answers.

A stream's role comes once per choice, in front of its first chunk; the finish reason comes with the last text. Where tools
may be called, the text goes through a `ToolCallReader`: what is no call is content, and what is one comes as `tool_calls`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from coordinator.api.answer import (
    CALLED_TOOLS,
    FINISH_JSON,
    ChoiceResult,
    ChunkFrame,
    Timelines,
    Usage,
    finite,
    json_bytes,
)
from coordinator.choice_stream import Delta, TokenLogprob
from coordinator.tokenizer import Tokenizer
from coordinator.tool_calls import Arguments, CallBegun, Content, ToolCallReader, ToolEvent
from coordinator.tool_formats import ToolFormat
from wire.sequence import SampledToken


class ChatFormat:
    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        tokenizer: Tokenizer,
        with_logprobs: bool,
        include_usage: bool,
        tools: ToolFormat | None = None,
    ) -> None:
        """`tools`: how calls are written; None: text is never a call."""
        head = {"id": answer_id, "object": "chat.completion.chunk", "created": created, "model": model}
        self._frame = ChunkFrame(head, include_usage)
        self._head = {**head, "object": "chat.completion"}
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._tools = tools
        self._readers: dict[int, ToolCallReader] = {}  # of the choices of a stream

    def opening(self, index: int, prompt: tuple[SampledToken, ...]) -> bytes:
        content = b'""' if self._tools is None else b"null"
        delta = b'{"role":"assistant","content":%b,"refusal":null}' % content
        return self._frame.event(b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}' % (index, delta))

    def chunk(self, index: int, delta: Delta, timelines: Timelines | None) -> bytes:
        logprobs = json_bytes(self._logprobs(delta.logprobs)) if delta.logprobs else b"null"
        if self._tools is None:
            content = b'{"content":%b}' % json_bytes(delta.text) if delta.text or delta.logprobs else b"{}"
            return self._choice(index, content, logprobs, FINISH_JSON[delta.finish], timelines)
        reader = self._readers.setdefault(index, ToolCallReader(self._tools))
        num_known = reader.num_calls
        events = reader.push(delta.text)
        if delta.finish is not None:
            events += reader.finish()
        if not events and not delta.logprobs and delta.finish is None:
            return b""
        finish = FINISH_JSON[delta.finish]
        if delta.finish == "stop" and reader.num_calls:
            finish = json_bytes(CALLED_TOOLS)
        return self._choice(index, json_bytes(_tool_delta(events, num_known)), logprobs, finish, timelines)

    def _choice(self, index: int, delta: bytes, logprobs: bytes, finish: bytes, timelines: Timelines | None) -> bytes:
        choice = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (index, delta, logprobs, finish)
        return self._frame.event(choice, timelines)

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._frame.usage_event(usage)

    def whole(self, results: Sequence[ChoiceResult], usage: Usage, timelines: Timelines | None) -> dict[str, object]:
        choices = []
        for result in results:
            message, calls = self._message("".join(result.text))
            choices.append(
                {
                    "index": result.index,
                    "message": message,
                    "logprobs": self._logprobs(result.logprobs) if self._with_logprobs else None,
                    "finish_reason": CALLED_TOOLS if calls and result.finish == "stop" else result.finish,
                }
            )
        answer = {**self._head, "choices": choices, "usage": usage.as_json()}
        return answer if timelines is None else {**answer, "kvrelay_timeline": timelines}

    def _message(self, text: str) -> tuple[dict[str, object], bool]:
        """An assistant's message, and whether it calls tools."""
        if self._tools is None:
            return {"role": "assistant", "content": text, "refusal": None}, False
        reader = ToolCallReader(self._tools)
        delta = _tool_delta(reader.push(text) + reader.finish(), 0)
        calls: dict[object, dict[str, object]] = {}
        for call in delta.get("tool_calls", []):
            known = calls.setdefault(call["index"], {"id": call.get("id"), "type": "function", "function": call["function"]})
            if "id" not in call:
                function = known["function"]
                assert isinstance(function, dict)
                function["arguments"] += call["function"]["arguments"]
        content = delta.get("content")
        message: dict[str, object] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = list(calls.values())
        return message, bool(calls)

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, object]:
        return {
            "content": [
                {
                    **self._token(entry.sampled.token_id, entry.sampled.logprob),
                    "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in entry.sampled.top],
                }
                for entry in entries
            ],
            "refusal": None,
        }

    def _token(self, token_id: int, logprob: float | None) -> dict[str, object]:
        """`bytes` are the token's own, so that the bytes of a character split over tokens join to it."""
        text, raw = self._tokenizer.token_text(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": None if raw is None else list(raw)}


def _tool_delta(events: Sequence[ToolEvent], num_known: int) -> dict[str, Any]:
    """A delta's fields. Id, type and name come once per call; `num_known` calls have begun before."""
    delta: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    index = num_known - 1
    for event in events:
        match event:
            case Content(text):
                delta["content"] = delta.get("content", "") + text
            case CallBegun(name):
                index += 1
                function = {"name": name, "arguments": ""}
                calls.append(
                    {"index": index, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
                )
            case Arguments(text):
                if calls and calls[-1]["index"] == index:
                    calls[-1]["function"]["arguments"] += text
                else:
                    calls.append({"index": index, "function": {"arguments": text}})
    if calls:
        delta["tool_calls"] = calls
    return delta
