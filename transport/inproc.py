"""Channels within one process and one event loop: `inproc://name`.

Nothing is serialised, but everything that the contract promises holds: buffers are copied, flow is bounded, ends are seen.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass

from transport.base import Allocate, Buffer, Channel, Listener, Message, OnChannel, Region, RemoteRegion, Transport, Write
from transport.buffers import SLICE_BYTES, as_bytes, copy, copy_sliced, fill_allocated, plan_put, slices
from transport.errors import AddressError, ChannelClosed, ConnectTimeout, PlacementRefused, TransportError
from transport.flow import CreditWindow, Inbox, Turn, cost_of
from transport.handlers import HandlerTasks
from transport.inproc_hub import InprocHub
from transport.limits import check_message
from transport.options import TransportOptions
from transport.regions import LocalRegion, RegionTable, decode_descriptor

_MAGIC = b"KVRINPR1"
_ADDRESS = re.compile(r"inproc://([A-Za-z0-9._-]{1,200})")


def _parse(address: str) -> str:
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise AddressError(f"address {address!r} is not of the form inproc://name")
    return match.group(1)


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    header: bytes
    buffers: tuple[memoryview, ...]
    cost: int


class InprocChannel(Channel):
    """One end of a pair; `join` connects it to the other."""

    def __init__(self, transport: InprocTransport, local: str, peer: str, limits: TransportOptions) -> None:
        self.local = local
        self.peer = peer
        self._transport = transport
        self._max_message_bytes = limits.max_message_bytes
        self._credit = CreditWindow(limits.max_in_flight_bytes)
        self._inbox: Inbox[_Sent] = Inbox()
        self._send_turn = asyncio.Lock()
        self._put_turn = asyncio.Lock()
        self._reader = Turn("receiving")
        self._other: InprocChannel = self
        self._ended: str | None = None

    def join(self, other: InprocChannel) -> None:
        self._other, other._other = other, self

    def check_open(self) -> None:
        if self._ended is not None:
            raise ChannelClosed(self._ended)

    async def send(self, header: bytes, buffers: Sequence[Buffer] = ()) -> None:
        views = [as_bytes(buffer) for buffer in buffers]
        cost = cost_of(check_message(header, views, self._max_message_bytes), self._credit.limit)
        async with self._send_turn:
            self.check_open()
            try:
                await self._credit.take(cost)
                copies = []
                for view in views:
                    copies.append(memoryview(bytearray(len(view))))
                    await copy_sliced(copies[-1], view)
            except asyncio.CancelledError:
                self._abort("a send was cancelled")
                raise
            self.check_open()
            self._other._inbox.push(_Sent(bytes(header), tuple(copies), cost))

    async def recv(self, allocate: Allocate | None = None) -> Message:
        with self._reader:
            sent = await self._inbox.first()
            buffers = sent.buffers if allocate is None else await fill_allocated(sent.buffers, allocate)
            self._inbox.remove(sent)
            self._other._credit.give(sent.cost)
            return Message(sent.header, buffers)

    async def open_region(self, descriptor: bytes) -> RemoteRegion:
        self.check_open()
        name = decode_descriptor(_MAGIC, descriptor)
        region = self._other._transport.regions.find(name.region_id)
        if region is None:
            raise TransportError("the peer has no such region")
        return _InprocRemoteRegion(self, region)

    async def place(self, region: LocalRegion, key: int, writes: Sequence[Write]) -> None:
        self.check_open()
        plan = plan_put(key, writes, region.name.nbytes)
        if not plan.nbytes:
            return
        async with self._put_turn:
            self.check_open()
            window = region.admit(key, plan.ranges)
            unyielded = 0
            for offset, source in plan.sources:
                for part in slices(source, SLICE_BYTES):
                    if unyielded + len(part) > SLICE_BYTES:
                        await self._let_others_run()
                        unyielded = 0
                    if not window.is_open:
                        raise PlacementRefused("the window was closed during the put")
                    copy(region.memory[offset : offset + len(part)], part)
                    offset += len(part)
                    unyielded += len(part)

    async def close(self) -> None:
        if self._ended is None:
            self._end("closed by this side")
            self._other._end("closed by the peer")
        self._inbox.discard(self._ended or "")

    def abort(self) -> None:
        self._abort("aborted by this side")

    def _abort(self, reason: str) -> None:
        if self._ended is None:
            self._end(reason)
            self._other._inbox.discard("aborted by the peer")
            self._other._end("aborted by the peer")
        self._inbox.discard(reason)

    def _end(self, reason: str) -> None:
        if self._ended is None:
            self._ended = reason
            self._credit.end(reason)
            self._inbox.finish(reason)
            self._transport.channels.discard(self)

    async def _let_others_run(self) -> None:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._abort("a put was cancelled")
            raise
        self.check_open()


class _InprocRemoteRegion(RemoteRegion):
    def __init__(self, channel: InprocChannel, region: LocalRegion) -> None:
        self.nbytes = region.name.nbytes
        self._channel = channel
        self._region = region

    async def put(self, key: int, writes: Sequence[Write]) -> None:
        await self._channel.place(self._region, key, writes)


class InprocListener(Listener):
    def __init__(self, transport: InprocTransport, name: str, on_channel: OnChannel) -> None:
        self.address = f"inproc://{name}"
        self.transport = transport
        self._name = name
        self._handlers = HandlerTasks(on_channel)

    def accept(self, dialer: InprocTransport) -> InprocChannel:
        """A connected pair; its other end goes to this listener's handler."""
        ours, theirs = self.transport.options, dialer.options
        limits = TransportOptions(
            max_in_flight_bytes=min(ours.max_in_flight_bytes, theirs.max_in_flight_bytes),
            max_message_bytes=min(ours.max_message_bytes, theirs.max_message_bytes),
        )
        dialed = InprocChannel(dialer, f"{self.address}#dialer", self.address, limits)
        accepted = InprocChannel(self.transport, self.address, f"{self.address}#dialer", limits)
        dialed.join(accepted)
        dialer.channels.add(dialed)
        self.transport.channels.add(accepted)
        self._handlers.start(accepted)
        return dialed

    async def close(self) -> None:
        self.transport.hub.listeners.remove(self._name, self)
        self.transport.listeners.discard(self)
        await self._handlers.close(self.transport.options.liveness_s)


class InprocTransport(Transport):
    scheme = "inproc"
    owns_memory = False

    def __init__(self, hub: InprocHub, options: TransportOptions | None = None) -> None:
        self.hub = hub
        self.options = options or TransportOptions()
        self.regions = RegionTable(_MAGIC)
        self.channels: set[InprocChannel] = set()
        self.listeners: set[InprocListener] = set()
        self._open = True

    def create_region(self, nbytes: int, memory: memoryview | None = None) -> Region:
        self._check_open()
        return self.regions.create(nbytes, memory)

    async def listen(self, address: str, on_channel: OnChannel) -> Listener:
        self._check_open()
        name = _parse(address)
        listener = InprocListener(self, name, on_channel)
        self.hub.listeners.add(name, listener)
        self.listeners.add(listener)
        return listener

    async def connect(self, address: str, deadline: float) -> Channel:
        self._check_open()
        name = _parse(address)
        if asyncio.get_running_loop().time() >= deadline:
            raise ConnectTimeout(f"{address}: the deadline has passed")
        listener = await self.hub.listeners.find(name, deadline)
        if not isinstance(listener, InprocListener):
            raise ConnectTimeout(f"{address}: nobody listens")
        return listener.accept(self)

    async def close(self) -> None:
        self._open = False
        for listener in list(self.listeners):
            await listener.close()
        for channel in list(self.channels):
            channel.abort()
        self.regions.close()

    def _check_open(self) -> None:
        if not self._open:
            raise TransportError("the transport is closed")
