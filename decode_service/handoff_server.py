"""Takes hand-offs: the asyncio shell around one `HandoffReceiver` per reservation.

A prefill worker's channel is served by one task; its messages are handled in order, and what a receiver decides is carried
out at once. A bad message (garbage, a foreign hand-off, blocks out of range) ends that channel, never the server.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from decode_service.kv_region import KvRegion
from decode_service.probe_slots import ProbeSlots
from engine.kv_packing import BlockPacker
from service_kit.checksums import checksums_off_loop
from service_kit.handoff_totals import HandoffTotals
from service_kit.outbox import Outbox, run_together
from service_kit.process_mark import ProcessWatch
from transport.base import ByteRange, Channel
from transport.buffers import copy
from transport.errors import TransportError
from wire.codec import to_decode_codec
from wire.control import FailureKind, HandoffTicket
from wire.errors import DecodeError, InvalidTransition
from wire.handoff import (
    BlocksPlaced,
    HandoffAbort,
    HandoffComplete,
    HandoffOpen,
    HandoffRefused,
    Hello,
    HelloAck,
    HelloRefused,
    Probe,
    ProbeAck,
    ToDecode,
)
from wire.handoff_receiver import (
    Aborted,
    Cancelled,
    ChannelLost,
    CloseWindow,
    Completed,
    Deliver,
    Failed,
    FreeBlocks,
    HandoffReceiver,
    Opened,
    Placed,
    ReceiverAction,
    ReceiverState,
    Send,
    WriterGone,
)
from wire.ids import BlockId, HandoffId, Incarnation, RequestId, WorkerId, new_window_key
from wire.kv_layout import PROTOCOL_VERSION, Fingerprint
from wire.sequence import SampledToken

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0


class HandoffOutcome(Protocol):
    """What the service does when a hand-off ends. Exactly one of `delivered` and `freed` is called for each grant."""

    def delivered(self, request_id: RequestId, first_token: SampledToken, transfer_s: float) -> None: ...

    def freed(self, request_id: RequestId) -> None:
        """Nobody writes into the request's blocks any more."""

    def failed(self, request_id: RequestId, kind: FailureKind, reason: str) -> None:
        """Comes before `freed`, and only when nobody had cancelled."""


@dataclass(slots=True)
class _Writer:
    """One prefill worker's channel."""

    channel: Channel
    hello: Hello
    outbox: Outbox
    process: ProcessWatch
    fenced_by_window: bool
    probe_key: int
    probe_slot: ByteRange | None
    ended: bool = False


@dataclass(slots=True)
class _Intake:
    """One granted reservation. `block_ids` are those of the ticket."""

    receiver: HandoffReceiver
    writer: _Writer | None = None
    opened_at: float = 0.0


class HandoffServer:
    """All hand-offs into one KV region.

    Args:
        clock: monotonic seconds.
        packers: by name, for prefill workers that pack what they send.
    """

    def __init__(
        self,
        region: KvRegion,
        *,
        worker_id: WorkerId,
        incarnation: Incarnation,
        fingerprint: Fingerprint,
        token: str,
        outcome: HandoffOutcome,
        clock: Callable[[], float],
        packers: Mapping[str, BlockPacker] = MappingProxyType({}),
    ) -> None:
        self._packers = packers
        self._region = region
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._fingerprint = fingerprint
        self._token = token
        self._outcome = outcome
        self._clock = clock
        self._codec = to_decode_codec()
        self._probe_slots = ProbeSlots(region.pool_bytes)
        self._intakes: dict[HandoffId, _Intake] = {}
        self._by_request: dict[RequestId, HandoffId] = {}
        self.totals = HandoffTotals()

    # -- what the service asks for --------------------------------------------------------------------------------------

    def grant(
        self,
        request_id: RequestId,
        handoff_id: HandoffId,
        block_ids: Sequence[BlockId],
        *,
        skip_tokens: int,
        num_tokens: int,
        lease_s: float,
    ) -> HandoffTicket:
        """Open a window for a reservation's blocks (those behind `skip_tokens`); they are lent from here on."""
        ticket = HandoffTicket(
            handoff_id=handoff_id,
            decode=self._worker_id,
            decode_incarnation=self._incarnation,
            window_key=new_window_key(),
            block_ids=tuple(block_ids),
            skip_tokens=skip_tokens,
            lease_s=lease_s,
        )
        self._region.open_window(ticket.window_key, ticket.block_ids)
        self._intakes[handoff_id] = _Intake(HandoffReceiver(request_id, ticket, num_tokens, self._clock()))
        self._by_request[request_id] = handoff_id
        return ticket

    def holds(self, request_id: RequestId) -> bool:
        return request_id in self._by_request

    def has_writer(self, request_id: RequestId) -> bool:
        handoff_id = self._by_request.get(request_id)
        return handoff_id is not None and self._intakes[handoff_id].receiver.state is not ReceiverState.RESERVED

    def cancel(self, request_id: RequestId, reason: str) -> None:
        """`freed` follows: at once, or when the writer has stopped."""
        if (handoff_id := self._by_request.get(request_id)) is not None:
            self._feed(self._intakes[handoff_id], Cancelled(reason))

    def tick(self) -> None:
        """Ends leases, and notices dead writers that could not say goodbye. Call a few times a second."""
        now = self._clock()
        for intake in list(self._intakes.values()):
            self._carry_out(intake, intake.receiver.tick(now))
            if intake.receiver.state is ReceiverState.FENCING and intake.writer and intake.writer.process.is_gone():
                self._feed(intake, WriterGone())

    @property
    def num_open(self) -> int:
        return len(self._intakes)

    # -- channels -------------------------------------------------------------------------------------------------------

    async def serve(self, scheme: str, channel: Channel) -> None:
        """One prefill worker's channel, from its Hello until it ends."""
        writer: _Writer | None = None
        try:
            writer = await self._greet(scheme, channel)
            if writer is not None:
                await run_together(writer.outbox.run(), self._receive(writer))
        except (TransportError, TimeoutError) as error:
            log.info("prefill channel from %s ended: %s", channel.peer, error or type(error).__name__)
        except (DecodeError, InvalidTransition) as error:
            log.warning("prefill channel from %s broke the protocol: %s", channel.peer, error)
        finally:
            channel.abort()
            if writer is not None:
                self._writer_ended(writer)

    async def _greet(self, scheme: str, channel: Channel) -> _Writer | None:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            hello = self._codec.decode((await channel.recv()).header)
        if not isinstance(hello, Hello):
            raise DecodeError(f"expected hello, got {type(hello).__name__}")
        outbox = Outbox(channel)
        refusal = self._refusal(hello)
        slot = self._probe_slots.take()
        if refusal is None and slot is None:
            refusal = "too many prefill workers are proving their links; try again"
        if refusal is not None or slot is None:
            if slot is not None:
                self._probe_slots.give_back(slot)
            log.warning("refused prefill worker %s at %s: %s", hello.prefill, channel.peer, refusal)
            await channel.send(self._codec.encode(HelloRefused(refusal or "")))
            await channel.close()
            return None
        self._fence_former_channels(hello)
        region = self._region.by_scheme[scheme]
        writer = _Writer(channel, hello, outbox, ProcessWatch(hello.process), region.receiver_copies, new_window_key(), slot)
        region.open_window(writer.probe_key, [slot])
        outbox.post(HelloAck(self._incarnation, region.descriptor(), writer.probe_key, slot.offset, slot.nbytes))
        log.info("prefill worker %s (%s) linked over %s", hello.prefill, hello.incarnation, scheme)
        return writer

    def _refusal(self, hello: Hello) -> str | None:
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            return "wrong cluster token"
        if hello.protocol_version != PROTOCOL_VERSION:
            return f"protocol version {hello.protocol_version}, this worker speaks {PROTOCOL_VERSION}"
        if hello.expected_decode != self._incarnation:
            return f"looking for incarnation {hello.expected_decode}, this is {self._incarnation}"
        if hello.packing and hello.packing not in self._packers:
            return f"blocks packed as {hello.packing!r}, which this worker cannot unpack"
        if differences := hello.fingerprint.differences(self._fingerprint):
            return f"different {' and '.join(differences)}"
        return None

    async def _receive(self, writer: _Writer) -> None:
        while True:
            await self._on_message(writer, self._codec.decode((await writer.channel.recv()).header))

    async def _on_message(self, writer: _Writer, message: ToDecode) -> None:
        match message:
            case Probe():
                await self._on_probe(writer, message)
            case HandoffOpen():
                self._on_open(writer, message)
            case BlocksPlaced():
                await self._on_placed(writer, message)
            case HandoffComplete(handoff_id=handoff_id):
                if intake := self._intake_of(writer, handoff_id):
                    self._feed(intake, Completed(message.num_blocks, message.num_tokens, message.first_token))
            case HandoffAbort(handoff_id=handoff_id):
                if intake := self._intake_of(writer, handoff_id):
                    self._feed(intake, Aborted(message.reason))
            case Hello():
                raise DecodeError("a second hello")

    async def _on_probe(self, writer: _Writer, probe: Probe) -> None:
        slot = writer.probe_slot
        if slot is None or not 0 < probe.num_bytes <= slot.nbytes:
            raise DecodeError(f"probe of {probe.num_bytes} bytes")
        (checksum,) = await checksums_off_loop([self._region.memory[slot.offset : slot.offset + probe.num_bytes]])
        self._end_probe(writer)
        writer.outbox.post(ProbeAck(checksum))

    def _on_open(self, writer: _Writer, message: HandoffOpen) -> None:
        intake = self._intakes.get(message.handoff_id)
        if intake is not None and intake.writer is writer and intake.receiver.state is ReceiverState.OPEN:
            self.totals.late_messages += 1  # said twice
        elif intake is None or intake.receiver.state is not ReceiverState.RESERVED:
            self.totals.late_messages += 1
            writer.outbox.post(HandoffRefused(message.handoff_id, "no such reservation: it has ended, or never was"))
        elif intake.receiver.ticket.window_key != message.window_key:
            writer.outbox.post(HandoffRefused(message.handoff_id, "wrong window key"))
        else:
            intake.writer = writer
            intake.opened_at = self._clock()
            self._feed(intake, Opened(writer.fenced_by_window))

    async def _on_placed(self, writer: _Writer, message: BlocksPlaced) -> None:
        intake = self._intake_of(writer, message.handoff_id)
        if intake is None:
            return
        block_ids = intake.receiver.ticket.block_ids
        if not 0 <= message.first <= message.first + len(message.checksums) <= len(block_ids):
            raise DecodeError(f"blocks {message.first}+{len(message.checksums)} of {len(block_ids)}")
        placed = block_ids[message.first : message.first + len(message.checksums)]
        packer = self._packers.get(writer.hello.packing)
        blocks = [self._region.block(block_id) for block_id in placed]
        if packer is not None:
            blocks = [block[: packer.packed_bytes] for block in blocks]
        found = await checksums_off_loop(blocks)
        intact = tuple(mine == theirs for mine, theirs in zip(found, message.checksums, strict=True))
        if not all(intact) and intake.receiver.state is ReceiverState.OPEN:
            log.warning("hand-off %s: %d corrupt blocks", message.handoff_id, intact.count(False))
        self.totals.nbytes += sum(block.nbytes for block in blocks)
        if packer is not None:
            await self._unpack(intake, packer, [block_id for block_id, ok in zip(placed, intact, strict=True) if ok])
        self._feed(intake, Placed(message.first, intact))

    async def _unpack(self, intake: _Intake, packer: BlockPacker, block_ids: Sequence[BlockId]) -> None:
        """Blocks that arrived packed, at their beginnings, become what the engine reads."""
        packed = [self._region.block(block_id)[: packer.packed_bytes] for block_id in block_ids]
        unpacked = await asyncio.to_thread(lambda: [packer.unpack(block) for block in packed])
        # Meanwhile the hand-off may have ended, and the blocks be somebody else's.
        if intake.receiver.state is ReceiverState.OPEN:
            for block_id, block in zip(block_ids, unpacked, strict=True):
                copy(self._region.block(block_id), block)

    def _intake_of(self, writer: _Writer, handoff_id: HandoffId) -> _Intake | None:
        """The hand-off that this writer opened; None (and counted) when it has ended."""
        intake = self._intakes.get(handoff_id)
        if intake is None or intake.writer is not writer:
            self.totals.late_messages += 1
            return None
        return intake

    def _fence_former_channels(self, hello: Hello) -> None:
        """A prefill worker dials anew only when every put of its former channel has ended."""
        for intake in list(self._intakes.values()):
            if intake.writer is not None and intake.writer.hello.incarnation == hello.incarnation:
                self._feed(intake, Aborted("the prefill worker linked anew"))

    def _end_probe(self, writer: _Writer) -> None:
        if writer.probe_slot is not None:
            self._region.close_window(writer.probe_key)
            self._probe_slots.give_back(writer.probe_slot)
            writer.probe_slot = None

    def _writer_ended(self, writer: _Writer) -> None:
        writer.ended = True
        self._end_probe(writer)
        for intake in [intake for intake in self._intakes.values() if intake.writer is writer]:
            gone = writer.process.is_gone()
            self._feed(intake, WriterGone() if gone else ChannelLost("channel ended"))

    # -- decisions ------------------------------------------------------------------------------------------------------

    def _feed(self, intake: _Intake, event: object) -> None:
        self._carry_out(intake, intake.receiver.handle(event, self._clock()))

    def _carry_out(self, intake: _Intake, actions: list[ReceiverAction]) -> None:
        receiver = intake.receiver
        for action in actions:
            match action:
                case Send(message=message):
                    if intake.writer is not None and not intake.writer.ended:
                        intake.writer.outbox.post(message)
                case CloseWindow():
                    self._region.close_window(receiver.ticket.window_key)
                case Deliver(first_token=first_token):
                    self._forget(receiver)
                    self.totals.handoffs += 1
                    self._outcome.delivered(receiver.request_id, first_token, self._clock() - intake.opened_at)
                case FreeBlocks():
                    self._forget(receiver)
                    self._outcome.freed(receiver.request_id)
                case Failed(kind=kind, reason=reason):
                    self.totals.failures += 1
                    log.warning(
                        "hand-off %s of request %s failed: %s", receiver.ticket.handoff_id, receiver.request_id, reason
                    )
                    self._outcome.failed(receiver.request_id, kind, reason)

    def _forget(self, receiver: HandoffReceiver) -> None:
        del self._intakes[receiver.ticket.handoff_id]
        del self._by_request[receiver.request_id]
