"""How /v1/chat/completions answers.

A stream's role comes once per choice, in front of its first chunk; the finish reason comes with the last text.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.api.answer import FINISH_JSON, ChoiceResult, ChunkFrame, Timelines, Usage, finite, json_bytes
from coordinator.choice_stream import Delta, TokenLogprob
from coordinator.tokenizer import Tokenizer


class ChatFormat:
    def __init__(
        self, answer_id: str, created: int, model: str, tokenizer: Tokenizer, with_logprobs: bool, include_usage: bool
    ) -> None:
        head = {"id": answer_id, "object": "chat.completion.chunk", "created": created, "model": model}
        self._frame = ChunkFrame(head, include_usage)
        self._head = {**head, "object": "chat.completion"}
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs

    def opening(self, index: int) -> bytes:
        delta = b'{"role":"assistant","content":"","refusal":null}'
        return self._frame.event(b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}' % (index, delta))

    def chunk(self, index: int, delta: Delta, timelines: Timelines | None) -> bytes:
        logprobs = json_bytes(self._logprobs(delta.logprobs)) if delta.logprobs else b"null"
        content = b'{"content":%b}' % json_bytes(delta.text) if delta.text or delta.logprobs else b"{}"
        choice = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (
            index,
            content,
            logprobs,
            FINISH_JSON[delta.finish],
        )
        return self._frame.event(choice, timelines)

    def usage_chunk(self, usage: Usage) -> bytes:
        return self._frame.usage_event(usage)

    def whole(self, results: Sequence[ChoiceResult], usage: Usage, timelines: Timelines | None) -> dict[str, object]:
        choices = [
            {
                "index": result.index,
                "message": {"role": "assistant", "content": "".join(result.text), "refusal": None},
                "logprobs": self._logprobs(result.logprobs) if self._with_logprobs else None,
                "finish_reason": result.finish,
            }
            for result in results
        ]
        answer = {**self._head, "choices": choices, "usage": usage.as_json()}
        return answer if timelines is None else {**answer, "kvrelay_timeline": timelines}

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
