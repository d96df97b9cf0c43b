"""UCX: messages go over ZeroMQ, puts by UCX, received straight into the owner's memory. Addresses: `ucx://host:port`.

The owner posts every receive, after it has checked key and ranges, and takes back what it has posted by closing the lane; so
`close_window` alone ends every write, and `receiver_copies` is True although nobody copies.
"""

from __future__ import annotations

import re
from weakref import WeakKeyDictionary

from transport.base import Channel, Listener, OnChannel, Region, RemoteRegion
from transport.errors import AddressError, TransportError
from transport.options import TransportOptions
from transport.regions import LocalRegion, RegionTable, decode_descriptor
from transport.ucx import UcxContext
from transport.ucx_frames import Done, Grant, Open, Opened, Put, decode_aside
from transport.ucx_owner import UcxOwner
from transport.ucx_writer import UcxRemoteRegion, UcxWriter
from transport.zmq_channel import ZmqChannel
from transport.zmq_transport import ZmqTransport

_MAGIC = b"KVRUCXR1"
_SCHEME = re.compile(r"ucx://(.+)", re.DOTALL)


class _Ends:
    """Both ends of a channel's lanes: of the one that this side writes through, and of the one that it owns."""

    def __init__(self, channel: ZmqChannel, context: UcxContext, regions: RegionTable) -> None:
        self.writer = UcxWriter(channel, context)
        self._owner = UcxOwner(channel, context, regions.find)
        channel.on_aside = self._hear
        channel.add_fence(self.writer.end)
        channel.add_fence(self._owner.end)

    def _hear(self, payload: memoryview) -> None:
        match decode_aside(payload):
            case Open() as wanted:
                self._owner.open(wanted)
            case Put() as put:
                self._owner.put(put)
            case Opened() as opened:
                self.writer.opened(opened)
            case Grant() as grant:
                self.writer.granted(grant)
            case Done() as done:
                self.writer.done(done)


class UcxRegions:
    def __init__(self, context: UcxContext) -> None:
        self._context = context
        self._table = RegionTable(_MAGIC)
        self._ends: WeakKeyDictionary[ZmqChannel, _Ends] = WeakKeyDictionary()

    def create(self, nbytes: int, memory: memoryview | None) -> Region:
        return self._table.create(nbytes, memory)

    def attach(self, channel: ZmqChannel) -> None:
        self._ends[channel] = _Ends(channel, self._context, self._table)

    def find(self, region_id: bytes) -> LocalRegion | None:
        return self._table.find(region_id)

    async def open(self, channel: ZmqChannel, descriptor: bytes) -> RemoteRegion:
        name = decode_descriptor(_MAGIC, descriptor)
        if not await channel.find_remote(name):
            raise TransportError("the peer has no such region")
        writer = self._ends[channel].writer
        await writer.open(name)
        return UcxRemoteRegion(channel, name, writer)

    def close(self) -> None:
        self._table.close()


class UcxTransport(ZmqTransport):
    scheme = "ucx"
    owns_memory = False

    def __init__(self, options: TransportOptions | None = None) -> None:
        """
        Raises:
            TransportError: ucxx is not installed, or UCX does not start.
        """
        self._ucx = UcxContext()
        super().__init__(options, UcxRegions(self._ucx))

    async def listen(self, address: str, on_channel: OnChannel) -> Listener:
        listener = await super().listen(_to_tcp(address), on_channel)
        listener.address = _from_tcp(listener.address)
        return listener

    async def connect(self, address: str, deadline: float) -> Channel:
        channel = await super().connect(_to_tcp(address), deadline)
        channel.peer = address
        return channel

    async def close(self) -> None:
        await super().close()
        await self._ucx.close(self._options.liveness_s)


def _to_tcp(address: str) -> str:
    match = _SCHEME.fullmatch(address)
    if match is None:
        raise AddressError(f"address {address!r} is not of the form ucx://host:port")
    return f"tcp://{match.group(1)}"


def _from_tcp(address: str) -> str:
    return address.replace("tcp://", "ucx://", 1)
