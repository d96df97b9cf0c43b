"""Gives hand-offs: the asyncio shell around one `HandoffSender` per request that has a ticket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.kv_packing import BlockPacker
from prefill_service.decode_link import DecodeLink
from service_kit.checksums import checksums_off_loop
from service_kit.handoff_totals import HandoffTotals
from transport.base import Write
from transport.errors import TransportError
from wire.control import FailureKind, HandoffTicket
from wire.errors import InvalidTransition
from wire.handoff import (
    HandoffAbort,
    HandoffAck,
    HandoffCancel,
    HandoffMissing,
    HandoffOpened,
    HandoffRefused,
    HelloAck,
    HelloRefused,
    ProbeAck,
    ToPrefill,
)
from wire.handoff_sender import (
    Acked,
    BlocksReady,
    Cancelled,
    CancelledByPeer,
    ChannelLost,
    Delivered,
    Failed,
    HandoffSender,
    Missing,
    Opened,
    PrefillDone,
    Put,
    PutDone,
    PutFailed,
    Refused,
    ReleaseSource,
    Send,
    SenderAction,
)
from wire.ids import BlockId, HandoffId, RequestId
from wire.kv_layout import KvLayout
from wire.sequence import SampledToken

log = logging.getLogger(__name__)

MAX_PUT_BYTES = 16 * 1024 * 1024


class ExportOutcome(Protocol):
    """What the service does when a hand-off ends. `source_released` is called exactly once for each start."""

    def source_released(self, request_id: RequestId) -> None:
        """Nothing reads the request's blocks any more."""

    def handoff_failed(self, request_id: RequestId, kind: FailureKind, reason: str) -> None: ...


@dataclass(slots=True)
class _Export:
    sender: HandoffSender
    link: DecodeLink
    first_block: int  # number, in the sequence, of the ticket's first block
    source: tuple[BlockId, ...] = ()  # P's blocks, of the whole sequence
    put: asyncio.Task[None] | None = None


class HandoffClient:
    """All hand-offs out of one KV pool.

    Args:
        pool: P's KV memory, block-major.
        clock: monotonic seconds.
        packer: makes blocks smaller for their way; None: they travel as they are.
    """

    def __init__(
        self,
        pool: memoryview,
        layout: KvLayout,
        outcome: ExportOutcome,
        clock: Callable[[], float],
        packer: BlockPacker | None = None,
    ) -> None:
        self._packer = packer
        self._pool = pool
        self._layout = layout
        self._outcome = outcome
        self._clock = clock
        self._exports: dict[HandoffId, _Export] = {}
        self._by_request: dict[RequestId, _Export] = {}
        self.totals = HandoffTotals()

    # -- what the service asks for --------------------------------------------------------------------------------------

    def start(self, request_id: RequestId, ticket: HandoffTicket, link: DecodeLink) -> None:
        sender = HandoffSender(
            request_id,
            ticket,
            deadline=self._clock() + ticket.lease_s,
            max_blocks_per_put=max(1, MAX_PUT_BYTES // self._layout.block_bytes),
        )
        export = _Export(sender, link, first_block=ticket.skip_tokens // self._layout.block_size)
        self._exports[ticket.handoff_id] = export
        self._by_request[request_id] = export
        self._carry_out(export, sender.start())

    def holds(self, request_id: RequestId) -> bool:
        return request_id in self._by_request

    def blocks_computed(self, request_id: RequestId, num_tokens: int, block_ids: tuple[BlockId, ...]) -> None:
        """The KV of `num_tokens` tokens lies in `block_ids`; only full blocks will not change any more."""
        if (export := self._by_request.get(request_id)) is not None:
            export.source = block_ids
            ready = num_tokens // self._layout.block_size - export.first_block
            if ready > 0:
                self._feed(export, BlocksReady(ready))

    def prefill_done(self, request_id: RequestId, num_tokens: int, first_token: SampledToken) -> None:
        if (export := self._by_request.get(request_id)) is not None:
            self._feed(export, PrefillDone(num_tokens, first_token))

    def cancel(self, request_id: RequestId, reason: str) -> None:
        """`source_released` follows: at once, or when the put in flight has ended."""
        if (export := self._by_request.get(request_id)) is not None:
            self._feed(export, Cancelled(reason))

    def tick(self) -> None:
        now = self._clock()
        for export in list(self._exports.values()):
            self._carry_out(export, export.sender.tick(now))

    @property
    def num_open(self) -> int:
        return len(self._exports)

    # -- LinkHandler ----------------------------------------------------------------------------------------------------

    def on_link_up(self, link: DecodeLink) -> None:
        pass  # Hand-offs start with their Prefill message, not with the link.

    def on_link_lost(self, link: DecodeLink, reason: str) -> None:
        for export in [export for export in self._exports.values() if export.link is link]:
            self._feed(export, ChannelLost(f"link to {link.peer.worker_id} lost: {reason}"))

    def on_handoff_message(self, link: DecodeLink, message: ToPrefill) -> None:
        match message:
            case HelloAck() | HelloRefused() | ProbeAck():
                log.warning("%s sent %s after the handshake", link.peer.worker_id, type(message).__name__)
                link.abort()
                return
            case HandoffOpened():
                event: object = Opened()
            case HandoffRefused(reason=reason):
                event = Refused(reason)
            case HandoffAck():
                event = Acked()
            case HandoffMissing(blocks=blocks):
                event = Missing(blocks)
            case HandoffCancel(reason=reason):
                event = CancelledByPeer(reason)
        export = self._exports.get(message.handoff_id)
        if export is None and isinstance(message, HandoffCancel):
            # It is over, and so is every put of it. D asks because it has not heard so, or in the very moment of the end.
            link.post(HandoffAbort(message.handoff_id, "nothing of it is left"))
        if export is None or export.link is not link:
            self.totals.late_messages += 1
            return
        try:
            self._feed(export, event)
        except InvalidTransition as error:
            log.warning("%s broke the protocol: %s", link.peer.worker_id, error)
            link.abort()

    # -- decisions ------------------------------------------------------------------------------------------------------

    def _feed(self, export: _Export, event: object) -> None:
        self._carry_out(export, export.sender.handle(event, self._clock()))

    def _carry_out(self, export: _Export, actions: Sequence[SenderAction]) -> None:
        request_id = export.sender.request_id
        for action in actions:
            match action:
                case Send(message=message):
                    export.link.post(message)
                case Put(first=first, count=count):
                    export.put = asyncio.create_task(self._put(export, first, count), name="handoff-put")
                case ReleaseSource():
                    del self._exports[export.sender.ticket.handoff_id]
                    del self._by_request[request_id]
                    self._outcome.source_released(request_id)
                case Delivered():
                    self.totals.handoffs += 1
                case Failed(kind=kind, reason=reason):
                    self.totals.failures += 1
                    log.warning("hand-off of request %s failed: %s", request_id, reason)
                    self._outcome.handoff_failed(request_id, kind, reason)

    async def _put(self, export: _Export, first: int, count: int) -> None:
        ticket = export.sender.ticket
        source = export.source[export.first_block + first : export.first_block + first + count]
        target = ticket.block_ids[first : first + count]
        blocks = [self._block(block_id) for block_id in source]
        if self._packer is None:
            writes = self._writes(source, target)
        else:
            blocks = await asyncio.to_thread(_pack, self._packer, blocks)  # the put in flight holds the source
            starts = [block_id * self._layout.block_bytes for block_id in target]
            writes = [Write(start, block) for start, block in zip(starts, blocks, strict=True)]
        # Both have ended before anything is decided: D may reuse its blocks as soon as it hears that P gave up.
        hashes, put_error = await asyncio.gather(
            checksums_off_loop(blocks), export.link.put(ticket.window_key, writes), return_exceptions=True
        )
        error = put_error if isinstance(put_error, BaseException) else hashes
        if isinstance(error, BaseException):
            if not isinstance(error, TransportError):  # a fault of ours: the hand-off must end all the same
                log.error("put of hand-off %s", ticket.handoff_id, exc_info=error)
            self._feed(export, PutFailed(f"put failed: {error or type(error).__name__}"))
            return
        assert not isinstance(hashes, BaseException)
        self.totals.nbytes += sum(block.nbytes for block in blocks)
        self._feed(export, PutDone(first, hashes))

    def _block(self, block_id: BlockId, count: int = 1) -> memoryview:
        return self._pool[block_id * self._layout.block_bytes : (block_id + count) * self._layout.block_bytes]

    def _writes(self, source: Sequence[BlockId], target: Sequence[BlockId]) -> list[Write]:
        """One write per run of blocks that lie side by side on both workers."""
        writes: list[Write] = []
        start = 0
        for i in range(1, len(source) + 1):
            if i == len(source) or source[i] != source[i - 1] + 1 or target[i] != target[i - 1] + 1:
                writes.append(Write(target[start] * self._layout.block_bytes, self._block(source[start], i - start)))
                start = i
        return writes


def _pack(packer: BlockPacker, blocks: Sequence[memoryview]) -> list[memoryview]:
    return [packer.pack(block) for block in blocks]
