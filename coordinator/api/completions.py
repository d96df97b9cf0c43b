"""How /v1/completions answers.

Logprobs: `tokens` are texts (`bytes:\\xf0\\x9f` for a token that is no text by itself), `top_logprobs` always holds the
drawn token as well, and `text_offset` counts characters from the start of `text`; it is not shifted by the prompt, which
is in `text` only with `echo`, and `echo` with logprobs is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.api.answer import FINISH_JSON, ChoiceResult, ChunkFrame, Timelines, Usage, finite, json_bytes
from coordinator.choice_stream import Delta, TokenLogprob
from coordinator.tokenizer import Tokenizer


class CompletionFormat:
    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        tokenizer: Tokenizer,
        echo_texts: Sequence[str],
        with_logprobs: bool,
        include_usage: bool,
    ) -> None:
        """`echo_texts`: per choice, what stands in front of its output."""
        self._head = {"id": answer_id, "object": "text_completion", "created": created, "model": model}
        self._frame = ChunkFrame(self._head, include_usage)
        self._tokenizer = tokenizer
        self._echo_texts = echo_texts
        self._with_logprobs = with_logprobs

    def opening(self, index: int) -> bytes:
        text = self._echo_texts[index]
        return self.chunk(index, Delta(text, (), None), None) if text else b""

    def chunk(self, index: int, delta: Delta, timelines: Timelines | None) -> bytes:
        logprobs = json_bytes(self._logprobs(delta.logprobs)) if delta.logprobs else b"null"
        choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (
            index,
            json_bytes(delta.text),
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
                "text": self._echo_texts[result.index] + "".join(result.text),
                "logprobs": self._logprobs(result.logprobs) if self._with_logprobs else None,
                "finish_reason": result.finish,
            }
            for result in results
        ]
        answer = {**self._head, "choices": choices, "usage": usage.as_json()}
        return answer if timelines is None else {**answer, "kvrelay_timeline": timelines}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, object]:
        return {
            "tokens": [self._tokenizer.token_text(entry.sampled.token_id)[0] for entry in entries],
            "token_logprobs": [finite(entry.sampled.logprob) for entry in entries],
            "top_logprobs": [self._alternatives(entry) for entry in entries],
            "text_offset": [entry.text_offset for entry in entries],
        }

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float]:
        found: dict[str, float] = {}
        for token_id, logprob in (*entry.sampled.top, (entry.sampled.token_id, entry.sampled.logprob)):
            found.setdefault(self._tokenizer.token_text(token_id)[0], finite(logprob))
        return found
