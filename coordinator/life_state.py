"""Where the life of one sequence stands."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from wire.control import TokenDelta
from wire.ids import HandoffId, Incarnation, RequestId
from wire.sequence import SequenceSpec


class State(enum.Enum):
    PLACING = "placing"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    PREFILLING_ALONE = "prefilling_alone"
    HANDING_OVER = "handing_over"
    COMPUTING = "computing"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL = frozenset({State.FINISHED, State.FAILED, State.CANCELLED})


@dataclass(slots=True)
class Attempt:
    """One try at a sequence, under a request id of its own."""

    request_id: RequestId
    decode: Incarnation | None = None
    prefill: Incarnation | None = None
    handoff: HandoffId | None = None
    holders: set[Incarnation] = field(default_factory=set)  # workers that may hold something for it
    held: list[TokenDelta] = field(default_factory=list)  # D's tokens, until the first one is known


def spec_of_attempt(spec: SequenceSpec, request_id: RequestId, output: Sequence[int]) -> SequenceSpec:
    """What an attempt's workers are asked for when the client has `output` already. The prompt's log-probabilities came
    with its first tokens."""
    prompt_logprobs = None if output else spec.prompt_logprobs
    return msgspec.structs.replace(spec, request_id=request_id, resumed=tuple(output), prompt_logprobs=prompt_logprobs)
