"""P's side of one hand-off, without I/O.

    OPENING ──Opened──▶ PUSHING ──all placed, first token drawn──▶ COMPLETING ──Acked──▶ DELIVERED
       │                   │  ▲──────────────Missing──────────────────┘ │
       └───── Refused, Cancelled, ChannelLost, DeadlinePassed, … ───────┴──▶ (STOPPING) ──▶ ENDED

Chunks become ready while earlier ones are being pushed; one put is in flight at a time, so what remains behind the last
chunk is that chunk's blocks. STOPPING waits for the put in flight: until it has ended, the source blocks must not be
reused and D must not be told that P writes nothing more.

Block numbers here count from the start of the ticket's `block_ids`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from wire.control import FailureKind, HandoffTicket
from wire.handoff import BlocksPlaced, HandoffAbort, HandoffComplete, HandoffOpen, ToDecode
from wire.ids import RequestId
from wire.sequence import SampledToken
from wire.state_machine import StateMachine


class SenderState(enum.Enum):
    OPENING = enum.auto()
    PUSHING = enum.auto()
    COMPLETING = enum.auto()
    STOPPING = enum.auto()
    DELIVERED = enum.auto()
    ENDED = enum.auto()


# -- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """D takes the hand-off."""


@dataclass(frozen=True, slots=True)
class Refused:
    reason: str


@dataclass(frozen=True, slots=True)
class BlocksReady:
    """The first `count` blocks will not change any more."""

    count: int


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The prompt is computed and its first token drawn: all blocks, the last partial one included, are ready."""

    num_tokens: int
    first_token: SampledToken


@dataclass(frozen=True, slots=True)
class PutDone:
    first: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PutFailed:
    reason: str


@dataclass(frozen=True, slots=True)
class Acked:
    """D has verified every block."""


@dataclass(frozen=True, slots=True)
class Missing:
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cancelled:
    """This side gives up: the request was cancelled, failed here, or ended with its first token."""

    reason: str


@dataclass(frozen=True, slots=True)
class CancelledByPeer:
    reason: str


@dataclass(frozen=True, slots=True)
class ChannelLost:
    reason: str


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The lease is over."""


# -- actions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    message: ToDecode


@dataclass(frozen=True, slots=True)
class Put:
    """Place `count` blocks from number `first` on; answer with PutDone or PutFailed."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class ReleaseSource:
    """Nothing reads P's blocks any more."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """D goes on from here."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The hand-off failed and nobody asked for that: the coordinator must hear of it."""

    kind: FailureKind
    reason: str


SenderAction = Send | Put | ReleaseSource | Delivered | Failed

_LATE = (Opened, Refused, BlocksReady, PrefillDone, Acked, Missing, Cancelled, CancelledByPeer, ChannelLost, DeadlinePassed)


class HandoffSender(StateMachine[SenderState, SenderAction]):
    """One hand-off as P sees it.

    Args:
        max_blocks_per_put: bounds how long a cancel waits for the put in flight.
        max_resends: how often D may ask for blocks again before the hand-off fails.
    """

    def __init__(
        self, request_id: RequestId, ticket: HandoffTicket, deadline: float, *, max_blocks_per_put: int, max_resends: int = 2
    ) -> None:
        super().__init__(f"handoff-sender {ticket.handoff_id}", SenderState.OPENING)
        self.ticket = ticket
        self.request_id = request_id
        self.deadline = deadline
        self._num_blocks = len(ticket.block_ids)
        self._max_blocks_per_put = max_blocks_per_put
        self._resends_left = max_resends
        self._ready = 0
        self._to_send: list[int] = []  # block numbers, in order; ready and not placed
        self._in_flight = False
        self._done: PrefillDone | None = None
        self._stop: tuple[FailureKind | None, str, bool] | None = None  # kind (None: nobody to tell), reason, tell D

    @property
    def over(self) -> bool:
        return self.state in (SenderState.DELIVERED, SenderState.ENDED)

    def start(self) -> list[SenderAction]:
        return [Send(HandoffOpen(self.ticket.handoff_id, self.request_id, self.ticket.window_key))]

    def tick(self, now: float) -> list[SenderAction]:
        return self.handle(DeadlinePassed(), now) if now >= self.deadline and not self.over else []

    def _opened(self, event: Opened, now: float) -> list[SenderAction]:
        self._move(SenderState.PUSHING)
        return self._go_on()

    def _blocks_ready(self, event: BlocksReady, now: float) -> list[SenderAction]:
        count = min(event.count, self._num_blocks)
        self._to_send.extend(range(self._ready, count))
        self._ready = max(self._ready, count)
        return self._go_on()

    def _prefill_done(self, event: PrefillDone, now: float) -> list[SenderAction]:
        self._done = event
        return self._blocks_ready(BlocksReady(self._num_blocks), now)

    def _put_done(self, event: PutDone, now: float) -> list[SenderAction]:
        self._in_flight = False
        placed = BlocksPlaced(self.ticket.handoff_id, event.first, event.checksums)
        return [Send(placed), *self._go_on()]

    def _put_failed(self, event: PutFailed, now: float) -> list[SenderAction]:
        self._in_flight = False
        return self._give_up(FailureKind.TRANSFER, event.reason, tell_peer=True)

    def _acked(self, event: Acked, now: float) -> list[SenderAction]:
        self._move(SenderState.DELIVERED)
        return [ReleaseSource(), Delivered()]

    def _missing(self, event: Missing, now: float) -> list[SenderAction]:
        if any(not 0 <= block < self._num_blocks for block in event.blocks) or self._resends_left == 0:
            return self._give_up(FailureKind.TRANSFER, f"D asks again for blocks {event.blocks}", tell_peer=True)
        self._resends_left -= 1
        self._to_send = sorted(set(event.blocks))
        self._move(SenderState.PUSHING)
        return self._go_on()

    def _cancelled(self, event: Cancelled, now: float) -> list[SenderAction]:
        return self._give_up(None, event.reason, tell_peer=True)

    def _cancelled_by_peer(self, event: CancelledByPeer, now: float) -> list[SenderAction]:
        # D has told the coordinator why; P only confirms that it stopped.
        return self._give_up(None, event.reason, tell_peer=True)

    def _refused(self, event: Refused, now: float) -> list[SenderAction]:
        return self._give_up(FailureKind.TRANSFER, f"D refused the hand-off: {event.reason}", tell_peer=False)

    def _channel_lost(self, event: ChannelLost, now: float) -> list[SenderAction]:
        return self._give_up(FailureKind.TRANSFER, event.reason, tell_peer=False)

    def _deadline_passed(self, event: DeadlinePassed, now: float) -> list[SenderAction]:
        return self._give_up(FailureKind.TRANSFER, f"lease over in state {self.state.name}", tell_peer=True)

    def _stopping_put_ended(self, event: PutDone | PutFailed, now: float) -> list[SenderAction]:
        self._in_flight = False
        assert self._stop is not None
        return self._end(*self._stop)

    def _stopping_channel_lost(self, event: ChannelLost, now: float) -> list[SenderAction]:
        assert self._stop is not None
        kind, reason, _ = self._stop
        self._stop = (kind, reason, False)
        return []

    def _go_on(self) -> list[SenderAction]:
        """The next put, or completion, if it is time."""
        if self.state is not SenderState.PUSHING or self._in_flight:
            return []
        if self._to_send:
            first = self._to_send[0]
            count = 1
            while count < min(len(self._to_send), self._max_blocks_per_put) and self._to_send[count] == first + count:
                count += 1
            del self._to_send[:count]
            self._in_flight = True
            return [Put(first, count)]
        if self._done is None:
            return []
        self._move(SenderState.COMPLETING)
        done = self._done
        return [Send(HandoffComplete(self.ticket.handoff_id, self._num_blocks, done.num_tokens, done.first_token))]

    def _give_up(self, kind: FailureKind | None, reason: str, *, tell_peer: bool) -> list[SenderAction]:
        if self._in_flight:
            self._stop = (kind, reason, tell_peer)
            self._move(SenderState.STOPPING)
            return []
        return self._end(kind, reason, tell_peer)

    def _end(self, kind: FailureKind | None, reason: str, tell_peer: bool) -> list[SenderAction]:
        self._move(SenderState.ENDED)
        actions: list[SenderAction] = []
        if tell_peer:
            actions.append(Send(HandoffAbort(self.ticket.handoff_id, reason)))
        actions.append(ReleaseSource())
        if kind is not None:
            actions.append(Failed(kind, reason))
        return actions

    TABLE: ClassVar[Mapping[tuple[Any, type], Callable[..., list[Any]]]] = {
        (SenderState.OPENING, Opened): _opened,
        (SenderState.OPENING, Refused): _refused,
        (SenderState.OPENING, BlocksReady): _blocks_ready,
        (SenderState.OPENING, PrefillDone): _prefill_done,
        (SenderState.OPENING, Cancelled): _cancelled,
        (SenderState.OPENING, CancelledByPeer): _cancelled_by_peer,
        (SenderState.OPENING, ChannelLost): _channel_lost,
        (SenderState.OPENING, DeadlinePassed): _deadline_passed,
        (SenderState.PUSHING, BlocksReady): _blocks_ready,
        (SenderState.PUSHING, PrefillDone): _prefill_done,
        (SenderState.PUSHING, PutDone): _put_done,
        (SenderState.PUSHING, PutFailed): _put_failed,
        (SenderState.PUSHING, Cancelled): _cancelled,
        (SenderState.PUSHING, CancelledByPeer): _cancelled_by_peer,
        (SenderState.PUSHING, ChannelLost): _channel_lost,
        (SenderState.PUSHING, DeadlinePassed): _deadline_passed,
        (SenderState.COMPLETING, Acked): _acked,
        (SenderState.COMPLETING, Missing): _missing,
        (SenderState.COMPLETING, Cancelled): _cancelled,
        (SenderState.COMPLETING, CancelledByPeer): _cancelled_by_peer,
        (SenderState.COMPLETING, ChannelLost): _channel_lost,
        (SenderState.COMPLETING, DeadlinePassed): _deadline_passed,
        (SenderState.STOPPING, PutDone): _stopping_put_ended,
        (SenderState.STOPPING, PutFailed): _stopping_put_ended,
        (SenderState.STOPPING, ChannelLost): _stopping_channel_lost,
        # Said twice: the first time counted.
        (SenderState.PUSHING, Opened): StateMachine._ignore,
        (SenderState.COMPLETING, Opened): StateMachine._ignore,
        (SenderState.PUSHING, Missing): StateMachine._ignore,
        # The stop has been decided; what arrives meanwhile changes nothing.
        **{
            (SenderState.STOPPING, event): StateMachine._ignore
            for event in (
                Opened, Refused, BlocksReady, PrefillDone, Missing, Cancelled, CancelledByPeer, DeadlinePassed,
            )
        },
        # Over. These may all be on their way when it ends.
        **{
            (state, event): StateMachine._ignore
            for state in (SenderState.DELIVERED, SenderState.ENDED)
            for event in _LATE
        },
    }  # fmt: skip
