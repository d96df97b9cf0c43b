"""P's link to one decode worker: dial, handshake, prove it with a probe hand-off, then carry hand-offs.

D's endpoints are tried in D's order of preference; the first whose probe arrives intact is taken, and why the others were
not is kept, so that a fallback is never silent.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from service_kit.checksums import checksums
from service_kit.outbox import Outbox, run_together
from transport.base import Channel, RemoteRegion, Transport, Write
from transport.errors import TransportError
from wire.codec import Codec, to_prefill_codec
from wire.control import DecodePeer, Endpoint
from wire.errors import DecodeError, ProtocolMismatch, WireError
from wire.handoff import Hello, HelloAck, HelloRefused, Probe, ProbeAck, ProcessMark, ToDecode, ToPrefill
from wire.ids import Incarnation, WorkerId
from wire.kv_layout import PROTOCOL_VERSION, Fingerprint

log = logging.getLogger(__name__)

LINK_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class LinkIdentity:
    """What P says of itself in every Hello."""

    worker_id: WorkerId
    incarnation: Incarnation
    fingerprint: Fingerprint
    process: ProcessMark
    token: str
    packing: str = ""


class LinkHandler(Protocol):
    def on_link_up(self, link: DecodeLink) -> None: ...

    def on_link_lost(self, link: DecodeLink, reason: str) -> None:
        """Also called, with the reasons, when the link could not be made."""

    def on_handoff_message(self, link: DecodeLink, message: ToPrefill) -> None: ...


@dataclass(slots=True)
class _Proven:
    channel: Channel
    region: RemoteRegion
    transport: str
    gb_per_s: float


class DecodeLink:
    """One attempt to be linked to one incarnation of a decode worker; ends for good when the channel ends."""

    def __init__(
        self,
        peer: DecodePeer,
        identity: LinkIdentity,
        transports: Mapping[str, Transport],
        handler: LinkHandler,
        clock: Callable[[], float],
    ) -> None:
        self.peer = peer
        self.transport = ""
        self.gb_per_s = 0.0
        self.path = ""
        self.up = False
        self.fallback_reason = ""
        self._identity = identity
        self._transports = transports
        self._handler = handler
        self._clock = clock
        self._codec: Codec[ToPrefill] = to_prefill_codec()
        self._outbox: Outbox | None = None
        self._region: RemoteRegion | None = None
        self._channel: Channel | None = None
        self._num_puts = 0
        self._puts_ended = asyncio.Event()
        self._puts_ended.set()

    async def run(self) -> None:
        """Until the link ends; the handler has heard of everything when this returns."""
        proven, reasons = await self._first_proven()
        if proven is None:
            self._handler.on_link_lost(self, "; ".join(reasons) or "no endpoint in common")
            return
        outbox = Outbox(proven.channel)
        self.transport, self.gb_per_s, self.fallback_reason = proven.transport, proven.gb_per_s, "; ".join(reasons)
        self.path = proven.region.path
        self._region, self._outbox, self._channel, self.up = proven.region, outbox, proven.channel, True
        self._handler.on_link_up(self)
        reason = "closed by this side"
        try:
            await run_together(outbox.run(), self._receive(proven.channel))
        except (TransportError, WireError) as error:
            reason = str(error) or type(error).__name__
        finally:
            self.up = False
            proven.channel.abort()
            self._handler.on_link_lost(self, reason)
            # The next Hello to this D tells it that nothing of this link writes any more.
            await self._puts_ended.wait()

    async def _receive(self, channel: Channel) -> None:
        while True:
            self._handler.on_handoff_message(self, self._codec.decode((await channel.recv()).header))

    def post(self, message: ToDecode) -> None:
        """Nothing is sent once the link has ended: D has seen it end as well."""
        if self._outbox is not None and self.up:
            self._outbox.post(message)

    async def flush(self) -> None:
        if self._outbox is not None and self.up:
            await self._outbox.flush()

    async def put(self, key: int, writes: Sequence[Write]) -> None:
        """
        Raises:
            TransportError: not placed, or not certainly.
        """
        assert self._region is not None
        self._num_puts += 1
        self._puts_ended.clear()
        try:
            await self._region.put(key, writes)
        finally:
            self._num_puts -= 1
            if self._num_puts == 0:
                self._puts_ended.set()

    def abort(self) -> None:
        """End the link: the channel is in an unknown state, or D broke the protocol."""
        if self._channel is not None:
            self._channel.abort()

    async def _first_proven(self) -> tuple[_Proven | None, list[str]]:
        reasons: list[str] = []
        for endpoint in self.peer.endpoints:
            transport = self._transports.get(endpoint.transport)
            if transport is None:
                reasons.append(f"{endpoint.transport}: not offered here")
                continue
            try:
                return await self._prove(transport, endpoint), reasons
            except (TransportError, WireError, TimeoutError) as error:
                reasons.append(f"{endpoint.transport}: {error or type(error).__name__}")
        return None, reasons

    async def _prove(self, transport: Transport, endpoint: Endpoint) -> _Proven:
        """Handshake and a probe hand-off, the whole within LINK_TIMEOUT_S."""
        deadline = asyncio.get_running_loop().time() + LINK_TIMEOUT_S
        channel = await transport.connect(endpoint.address, deadline)
        try:
            async with asyncio.timeout_at(deadline):
                ack = await self._greet(channel)
                region = await channel.open_region(ack.region)
                gb_per_s = await self._probe(channel, region, ack)
            return _Proven(channel, region, endpoint.transport, gb_per_s)
        except BaseException:
            channel.abort()
            raise

    async def _greet(self, channel: Channel) -> HelloAck:
        hello = Hello(
            protocol_version=PROTOCOL_VERSION,
            prefill=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            expected_decode=self.peer.incarnation,
            fingerprint=self._identity.fingerprint,
            process=self._identity.process,
            token=self._identity.token,
            packing=self._identity.packing,
        )
        await channel.send(self._codec.encode(hello))
        match self._codec.decode((await channel.recv()).header):
            case HelloAck() as ack if ack.incarnation == self.peer.incarnation:
                return ack
            case HelloRefused(reason=reason):
                raise ProtocolMismatch(f"refused: {reason}")
            case other:
                raise DecodeError(f"expected an answer to hello, got {type(other).__name__}")

    async def _probe(self, channel: Channel, region: RemoteRegion, ack: HelloAck) -> float:
        """Random bytes through the whole path; returns GB/s of the put alone."""
        payload = secrets.token_bytes(ack.probe_bytes)
        started = self._clock()
        await region.put(ack.probe_key, [Write(ack.probe_offset, payload)])
        seconds = self._clock() - started
        await channel.send(self._codec.encode(Probe(len(payload))))
        answer = self._codec.decode((await channel.recv()).header)
        if answer != ProbeAck(*checksums([memoryview(payload)])):
            raise DecodeError("the probe hand-off arrived changed")
        return len(payload) / max(seconds, 1e-9) / 1e9
