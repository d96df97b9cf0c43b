"""What the two generating routes have in common about their answers: usage, results, and how bytes of JSON are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from coordinator.api.headers import route_name
from coordinator.choice_stream import Delta, Finish, TokenLogprob
from coordinator.generation import Generation
from wire.sequence import SampledToken

_LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot say
# Line ends to `str.splitlines`, with which some clients cut event streams; JSON does not escape them by itself.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


@dataclass(frozen=True, slots=True)
class Usage:
    """Prompt tokens count once per prompt, whatever `n` is; completion tokens are all generated ones, end tokens too."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_json(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class ChoiceResult:
    """One choice of an answer that is sent whole: its deltas, joined."""

    index: int
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    prompt: tuple[SampledToken, ...] = ()
    mean_logprob: float = 0.0  # of all its tokens

    def add(self, delta: Delta) -> None:
        self.prompt = self.prompt or delta.prompt
        self.text.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        self.finish = delta.finish


Timelines = Sequence[Mapping[str, object]]


class AnswerFormat(Protocol):
    """Writes one answer, whole or in chunks. Chunks are complete `data:` events."""

    def opening(self, index: int, prompt: tuple[SampledToken, ...]) -> bytes:
        """What goes in front of a choice's first chunk; may be nothing.

        Args:
            prompt: the prompt's tokens with their log-probabilities, if they were asked for.
        """

    def chunk(self, index: int, delta: Delta, timelines: Timelines | None) -> bytes: ...

    def usage_chunk(self, usage: Usage) -> bytes: ...

    def whole(self, results: Sequence[ChoiceResult], usage: Usage, timelines: Timelines | None) -> dict[str, object]: ...


def json_bytes(value: object) -> bytes:
    """JSON on one line in every reader's eyes."""
    encoded = msgspec.json.encode(value)
    if not encoded.isascii():
        for raw, escaped in _LINE_ENDS:
            encoded = encoded.replace(raw, escaped)
    return encoded


def finite(logprob: float | None) -> float:
    return _LOWEST_LOGPROB if logprob is None or not logprob > _LOWEST_LOGPROB else logprob


def timeline_entry(index: int, generation: Generation) -> dict[str, object]:
    placement = generation.placement
    return {
        "index": index,
        "route": None if placement is None else route_name(placement),
        "policy": None if placement is None else placement.policy,
        "fallback": None if placement is None else placement.fallback,
        **dataclasses.asdict(generation.timeline),
    }


def best_of_each(results: Sequence[ChoiceResult], n: int, best_of: int) -> list[ChoiceResult]:
    """Of each prompt's `best_of` results the `n` with the highest log-probability per token, best first, numbered anew."""
    if best_of == n:
        return list(results)
    kept: list[ChoiceResult] = []
    for start in range(0, len(results), best_of):
        ranked = sorted(results[start : start + best_of], key=lambda result: (-result.mean_logprob, result.index))
        for result in ranked[:n]:
            kept.append(dataclasses.replace(result, index=len(kept)))
    return kept


class ChunkFrame:
    """The constant bytes around every chunk of one stream."""

    def __init__(self, head: Mapping[str, object], include_usage: bool) -> None:
        """`head`: id, object, created and model."""
        self._head = b"data: " + json_bytes(head)[:-1] + b',"choices":['
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"

    def event(self, choice: bytes, timelines: Timelines | None = None) -> bytes:
        if timelines is None:
            return self._head + choice + b"]" + self._tail
        return self._head + choice + b'],"kvrelay_timeline":' + json_bytes(timelines) + self._tail

    def usage_event(self, usage: Usage) -> bytes:
        return self._head + b'],"usage":' + json_bytes(usage.as_json()) + b"}\n\n"


FINISH_JSON: dict[Finish | None, bytes] = {None: b"null", "stop": b'"stop"', "length": b'"length"'}
CALLED_TOOLS = "tool_calls"  # the finish reason of a choice that ended well and calls tools
