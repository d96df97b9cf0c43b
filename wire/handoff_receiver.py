"""D's side of one hand-off, without I/O.

    RESERVED ──Opened──▶ OPEN ──Completed, every block verified──▶ DELIVERED
        │                  │
        │                  ├── Aborted by P ─────────────────────▶ ENDED
        │                  └── Cancelled, LeaseOver, ChannelLost ─▶ FENCING ── P stopped, or is dead ──▶ ENDED
        └── Cancelled, LeaseOver ─▶ ENDED   (no writer knows the blocks: free at once)

The blocks are lent to a writer from Opened on. They are freed only when it is certain that nobody writes any more: P said so
(`Aborted`), P's process is gone, or this side does the copying itself (`fenced_by_window`), so that a closed window is
enough. Until then they stay out of the pool, whatever happened to the request; the writer is asked again and again.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from wire.control import FailureKind, HandoffTicket
from wire.handoff import (
    HandoffAck,
    HandoffCancel,
    HandoffMissing,
    HandoffOpened,
    ToPrefill,
)
from wire.ids import RequestId
from wire.sequence import SampledToken
from wire.state_machine import StateMachine

ASK_AGAIN_S = 1.0
"""How often a writer that does not say that it has stopped is told to."""


class ReceiverState(enum.Enum):
    RESERVED = enum.auto()
    OPEN = enum.auto()
    FENCING = enum.auto()
    DELIVERED = enum.auto()
    ENDED = enum.auto()


# -- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """A writer with the right key announced itself.

    `fenced_by_window`: its bytes are copied by this process, so closing the window stops it.
    """

    fenced_by_window: bool


@dataclass(frozen=True, slots=True)
class Placed:
    """Blocks from number `first` on were checked against the writer's checksums."""

    first: int
    intact: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Completed:
    num_blocks: int
    num_tokens: int
    first_token: SampledToken


@dataclass(frozen=True, slots=True)
class Aborted:
    """P writes nothing more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """This side gives up: the request was cancelled, or its coordinator is gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class ChannelLost:
    reason: str


@dataclass(frozen=True, slots=True)
class WriterGone:
    """The writer's process does not exist any more."""


@dataclass(frozen=True, slots=True)
class LeaseOver:
    pass


@dataclass(frozen=True, slots=True)
class FenceOverdue:
    """The writer was told to stop and has not said that it did."""


# -- actions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    message: ToPrefill


@dataclass(frozen=True, slots=True)
class CloseWindow:
    pass


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """The blocks are the engine's again."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """All KV is here and right: decode from the next step on."""

    first_token: SampledToken


@dataclass(frozen=True, slots=True)
class Failed:
    """The hand-off failed and nobody asked for that: the coordinator must hear of it."""

    kind: FailureKind
    reason: str


ReceiverAction = Send | CloseWindow | FreeBlocks | Deliver | Failed


class HandoffReceiver(StateMachine[ReceiverState, ReceiverAction]):
    """One hand-off as D sees it. The lease runs anew with every message of the writer.

    Args:
        num_tokens: tokens whose KV D must have in the end, those of `ticket.skip_tokens` included.
        max_resends: how often missing or corrupt blocks are asked for again.
    """

    def __init__(
        self, request_id: RequestId, ticket: HandoffTicket, num_tokens: int, now: float, *, max_resends: int = 2
    ) -> None:
        super().__init__(f"handoff-receiver {ticket.handoff_id}", ReceiverState.RESERVED)
        self.request_id = request_id
        self.ticket = ticket
        self._num_tokens = num_tokens
        self._intact = [False] * len(ticket.block_ids)
        self._resends_left = max_resends
        self._fenced_by_window = False
        self._lease_ends = now + ticket.lease_s
        self._ask_again_at = 0.0  # while FENCING

    @property
    def over(self) -> bool:
        return self.state in (ReceiverState.DELIVERED, ReceiverState.ENDED)

    def tick(self, now: float) -> list[ReceiverAction]:
        if self.state is ReceiverState.FENCING:
            return self.handle(FenceOverdue(), now) if now >= self._ask_again_at else []
        return self.handle(LeaseOver(), now) if now >= self._lease_ends and not self.over else []

    def _renew(self, now: float) -> None:
        self._lease_ends = now + self.ticket.lease_s

    def _opened(self, event: Opened, now: float) -> list[ReceiverAction]:
        self._fenced_by_window = event.fenced_by_window
        self._renew(now)
        self._move(ReceiverState.OPEN)
        return [Send(HandoffOpened(self.ticket.handoff_id))]

    def _placed(self, event: Placed, now: float) -> list[ReceiverAction]:
        self._renew(now)
        for number, intact in enumerate(event.intact, start=event.first):
            self._intact[number] = intact
        return []

    def _completed(self, event: Completed, now: float) -> list[ReceiverAction]:
        self._renew(now)
        if event.num_blocks != len(self._intact) or event.num_tokens != self._num_tokens:
            return self._fail(
                f"P completed {event.num_blocks} blocks and {event.num_tokens} tokens, "
                f"{len(self._intact)} and {self._num_tokens} were reserved",
                now,
            )
        missing = tuple(number for number, intact in enumerate(self._intact) if not intact)
        if missing and self._resends_left > 0:
            self._resends_left -= 1
            return [Send(HandoffMissing(self.ticket.handoff_id, missing))]
        if missing:
            return self._fail(f"blocks {missing} are missing or corrupt after every resend", now)
        self._move(ReceiverState.DELIVERED)
        return [CloseWindow(), Deliver(event.first_token), Send(HandoffAck(self.ticket.handoff_id))]

    def _aborted(self, event: Aborted, now: float) -> list[ReceiverAction]:
        # P tells the coordinator itself why it gave up.
        self._move(ReceiverState.ENDED)
        return [CloseWindow(), FreeBlocks()]

    def _cancelled_reserved(self, event: Cancelled, now: float) -> list[ReceiverAction]:
        self._move(ReceiverState.ENDED)
        return [CloseWindow(), FreeBlocks()]

    def _lease_over_reserved(self, event: LeaseOver, now: float) -> list[ReceiverAction]:
        self._move(ReceiverState.ENDED)
        return [
            CloseWindow(),
            FreeBlocks(),
            Failed(FailureKind.TRANSFER, "no prefill worker came before the lease was over"),
        ]

    def _cancelled_open(self, event: Cancelled, now: float) -> list[ReceiverAction]:
        return self._fence(HandoffCancel(self.ticket.handoff_id, event.reason), now)

    def _lease_over_open(self, event: LeaseOver, now: float) -> list[ReceiverAction]:
        return self._fail("lease over while the KV was on its way", now)

    def _channel_lost_open(self, event: ChannelLost, now: float) -> list[ReceiverAction]:
        return [Failed(FailureKind.TRANSFER, f"channel to the prefill worker lost: {event.reason}"), *self._fence(None, now)]

    def _writer_gone_open(self, event: WriterGone, now: float) -> list[ReceiverAction]:
        self._move(ReceiverState.ENDED)
        return [Failed(FailureKind.TRANSFER, "the prefill worker is dead"), CloseWindow(), FreeBlocks()]

    def _fenced(self, event: Aborted | WriterGone | Completed, now: float) -> list[ReceiverAction]:
        self._move(ReceiverState.ENDED)
        return [FreeBlocks()]

    def _fence_overdue(self, event: FenceOverdue, now: float) -> list[ReceiverAction]:
        self._ask_again_at = now + ASK_AGAIN_S
        return [Send(HandoffCancel(self.ticket.handoff_id, "has it stopped?"))]

    def _fail(self, reason: str, now: float) -> list[ReceiverAction]:
        cancel = HandoffCancel(self.ticket.handoff_id, reason)
        return [Failed(FailureKind.TRANSFER, reason), *self._fence(cancel, now)]

    def _fence(self, message: HandoffCancel | None, now: float) -> list[ReceiverAction]:
        """Stop the writer; free the blocks now if that is certain."""
        actions: list[ReceiverAction] = [CloseWindow()]
        if message is not None:
            actions.append(Send(message))
        if self._fenced_by_window:
            self._move(ReceiverState.ENDED)
            actions.append(FreeBlocks())
        else:
            self._move(ReceiverState.FENCING)
            self._ask_again_at = now + ASK_AGAIN_S
        return actions

    TABLE: ClassVar[Mapping[tuple[Any, type], Callable[..., list[Any]]]] = {
        (ReceiverState.RESERVED, Opened): _opened,
        (ReceiverState.RESERVED, Cancelled): _cancelled_reserved,
        (ReceiverState.RESERVED, LeaseOver): _lease_over_reserved,
        (ReceiverState.OPEN, Placed): _placed,
        (ReceiverState.OPEN, Completed): _completed,
        (ReceiverState.OPEN, Aborted): _aborted,
        (ReceiverState.OPEN, Cancelled): _cancelled_open,
        (ReceiverState.OPEN, LeaseOver): _lease_over_open,
        (ReceiverState.OPEN, ChannelLost): _channel_lost_open,
        (ReceiverState.OPEN, WriterGone): _writer_gone_open,
        # A writer that completes has stopped as surely as one that aborts.
        (ReceiverState.FENCING, Aborted): _fenced,
        (ReceiverState.FENCING, Completed): _fenced,
        (ReceiverState.FENCING, WriterGone): _fenced,
        (ReceiverState.FENCING, FenceOverdue): _fence_overdue,
        **{
            (ReceiverState.FENCING, event): StateMachine._ignore
            for event in (Placed, Cancelled, ChannelLost, LeaseOver)
        },
        **{
            (state, event): StateMachine._ignore
            for state in (ReceiverState.DELIVERED, ReceiverState.ENDED)
            for event in (Placed, Completed, Aborted, Cancelled, ChannelLost, WriterGone, LeaseOver)
        },
    }  # fmt: skip
