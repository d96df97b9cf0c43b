"""Where the life of one sequence stands."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from wire.control import TokenDelta
from wire.ids import HandoffId, Incarnation, RequestId


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
