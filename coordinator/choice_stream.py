"""One sequence's tokens to what a client sees of it: text, logprobs, finish reason. Pure; both answer modes are made of it.

Rules, the same for streams and whole answers:
- The token that ends a sequence (end of sequence, or a stop token id) counts as generated and has no text. Its logprobs are
  shown where the caller wants them: last, at the offset where the text ends.
- When a stop string is complete, the text is cut there and tokens behind it are dropped; `num_tokens` counts up to and
  including the token that completed it.
- A token's logprobs come out together with its first character, and not at all if a stop string cut it away completely.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from coordinator.detokenizer import Detokenizer
from coordinator.stop_strings import StopMatcher
from wire.sequence import FinishReason, SampledToken

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """`text_offset` counts characters of the output text in front of the token."""

    sampled: SampledToken
    text_offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What came to one choice. With `finish`, it was the last."""

    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish: Finish | None
    prompt: tuple[SampledToken, ...] = ()  # the prompt's tokens with their log-probabilities; with a choice's first delta

    def __bool__(self) -> bool:
        return self.has_output or bool(self.prompt)

    @property
    def has_output(self) -> bool:
        return bool(self.text or self.logprobs or self.finish)


class ChoiceStream:
    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: tuple[str, ...],
        include_stop: bool,
        with_logprobs: bool,
        with_end_logprob: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, include_stop)
        self._with_logprobs = with_logprobs
        self._with_end_logprob = with_end_logprob
        self._num_decoded_chars = 0
        self._num_shown_chars = 0
        self._waiting: deque[TokenLogprob] = deque()
        self.num_tokens = 0
        self.sum_logprob = 0.0  # of the tokens that count, end tokens too; 0 if no log-probabilities came

    def push(self, tokens: tuple[SampledToken, ...], finish: FinishReason | None) -> Delta:
        """Take the next tokens. Nothing may be pushed behind a delta with `finish`."""
        shown: list[str] = []
        stopped = False
        last = len(tokens) - 1
        for index, sampled in enumerate(tokens):
            self.num_tokens += 1
            self.sum_logprob += sampled.logprob or 0.0
            if finish is FinishReason.STOP and index == last:
                if self._with_logprobs and self._with_end_logprob:
                    self._waiting.append(TokenLogprob(sampled, self._num_decoded_chars))
                break
            if self._with_logprobs:
                self._waiting.append(TokenLogprob(sampled, self._num_decoded_chars))
            piece = self._detokenizer.push(sampled.token_id)
            self._num_decoded_chars += len(piece)
            text, stopped = self._matcher.push(piece)
            shown.append(text)
            if stopped:
                break
        if finish is not None and not stopped:
            shown.append(self._matcher.flush())
        joined = "".join(shown)
        self._num_shown_chars += len(joined)
        if stopped:
            return Delta(joined, self._release(), "stop")
        if finish is not None:
            return Delta(joined, self._release(everything=True), "stop" if finish is FinishReason.STOP else "length")
        return Delta(joined, self._release(), None)

    def _release(self, everything: bool = False) -> tuple[TokenLogprob, ...]:
        released: list[TokenLogprob] = []
        while self._waiting and (everything or self._waiting[0].text_offset < self._num_shown_chars):
            released.append(self._waiting.popleft())
        return tuple(released)
