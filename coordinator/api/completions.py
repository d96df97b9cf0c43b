"""How /v1/completions answers.

Logprobs: `tokens` are texts (`bytes:\\xf0\\x9f` for a token that is no text by itself), `top_logprobs` always holds the
drawn token as well, and `text_offset` counts characters from the start of `text`, which begins with the prompt only with
`echo`. With `echo` the prompt's tokens come first; the very first one has no logprob. The token that ends a choice comes
last, so that `completion_tokens` of them are there unless a stop string cut some off: evaluation harnesses count on it.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.api.answer import FINISH_JSON, ChoiceResult, ChunkFrame, Timelines, Usage, finite, json_bytes
from coordinator.choice_stream import Delta, TokenLogprob
from coordinator.prompt_offsets import prompt_offsets
from coordinator.tokenizer import Tokenizer
from wire.sequence import SampledToken


class CompletionFormat:
    def __init__(
        self,
        answer_id: str,
        created: int,
        model: str,
        tokenizer: Tokenizer,
        echo_texts: Sequence[str],
        n: int,
        with_logprobs: bool,
        include_usage: bool,
    ) -> None:
        """`echo_texts`: per prompt, what stands in front of its output; each prompt has `n` choices."""
        self._head = {"id": answer_id, "object": "text_completion", "created": created, "model": model}
        self._frame = ChunkFrame(self._head, include_usage)
        self._tokenizer = tokenizer
        self._echo_texts = echo_texts
        self._n = n
        self._with_logprobs = with_logprobs

    def opening(self, index: int, prompt: tuple[SampledToken, ...]) -> bytes:
        text = self._echo_text(index)
        if not text:
            return b""
        logprobs = json_bytes(self._logprobs(text, prompt, ())) if prompt else b"null"
        choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}' % (index, json_bytes(text), logprobs)
        return self._frame.event(choice)

    def chunk(self, index: int, delta: Delta, timelines: Timelines | None) -> bytes:
        logprobs = json_bytes(self._logprobs(self._echo_text(index), (), delta.logprobs)) if delta.logprobs else b"null"
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
                "text": self._echo_text(result.index) + "".join(result.text),
                "logprobs": self._logprobs(self._echo_text(result.index), result.prompt, result.logprobs)
                if self._with_logprobs
                else None,
                "finish_reason": result.finish,
            }
            for result in results
        ]
        answer = {**self._head, "choices": choices, "usage": usage.as_json()}
        return answer if timelines is None else {**answer, "kvrelay_timeline": timelines}

    def _echo_text(self, index: int) -> str:
        return self._echo_texts[index // self._n]

    def _logprobs(
        self, echo_text: str, prompt: Sequence[SampledToken], entries: Sequence[TokenLogprob]
    ) -> dict[str, object]:
        tokens = [*prompt, *(entry.sampled for entry in entries)]
        offsets = prompt_offsets([token.token_id for token in prompt], echo_text, self._tokenizer) if prompt else []
        first = [None] if prompt else []  # nothing stands in front of the prompt's first token
        known = tokens[len(first) :]
        return {
            "tokens": [self._tokenizer.token_text(token.token_id)[0] for token in tokens],
            "token_logprobs": [*first, *(finite(token.logprob) for token in known)],
            "top_logprobs": [*first, *(self._alternatives(token) for token in known)],
            "text_offset": [*offsets, *(len(echo_text) + entry.text_offset for entry in entries)],
        }

    def _alternatives(self, token: SampledToken) -> dict[str, float]:
        found: dict[str, float] = {}
        for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
            found.setdefault(self._tokenizer.token_text(token_id)[0], finite(logprob))
        return found
