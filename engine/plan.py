"""The seam between scheduler and runner: what one step computes, and what came out of it.

The unit is tokens per sequence. A prompt's chunk, the rest behind a prefix hit and a decode step are the same thing: the
next `len(token_ids)` tokens of a sequence, from position `start` on.

        0          start        start + len(token_ids)
        ├── KV is in the pool ──┼── this step ──┤
        └─ block_ids cover ─────────────────────┘   (the last block may be partly filled)

What every step makes anew for every sequence is a `msgspec.Struct`: a frozen dataclass takes six times as long to make.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from wire.ids import BlockId, RequestId
from wire.sequence import SampledToken, SamplingParams


class SampleRequest(msgspec.Struct, frozen=True, gc=False):
    """Draw the token behind the last one of this step.

    `position` is the drawn token's index in the sequence: with the seed it fixes the noise, whoever draws.
    `prompt` and `output` are given only when `params.needs_history`.
    """

    params: SamplingParams
    position: int
    banned_token_ids: frozenset[int] = frozenset()  # end tokens, while min_tokens is not reached
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    allowed: bytes = b""  # tokens that the grammar allows, as `GrammarState.allowed` gives them; empty: no grammar


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Log-probabilities of known tokens: `token_ids[i]` stands behind row `first_row + i` of the sequence's rows."""

    num_logprobs: int
    first_row: int
    token_ids: tuple[int, ...]


class ScheduledSequence(msgspec.Struct, frozen=True, gc=False):
    request_id: RequestId
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[BlockId, ...]
    sample: SampleRequest | None  # None: a chunk that is not the last
    score: ScoreRequest | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    step: int
    sequences: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class StepResult:
    """`sampled` holds a token for every sequence whose `sample` was set, `scored` the tokens of every `score`."""

    step: int
    sampled: Mapping[RequestId, SampledToken] = field(default_factory=dict)
    scored: Mapping[RequestId, tuple[SampledToken, ...]] = field(default_factory=dict)
