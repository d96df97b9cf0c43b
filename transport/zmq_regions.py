"""Regions that peers reach through their ZeroMQ channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from transport.base import Region, RemoteRegion, Write
from transport.buffers import plan_put
from transport.errors import TransportError
from transport.regions import LocalRegion, RegionName, RegionTable, decode_descriptor
from transport.zmq_channel import ZmqChannel

_MAGIC = b"KVRZMQR1"


class RegionSpace(Protocol):
    """The kind of region that a ZeroMQ transport offers; owns the regions that it created."""

    def create(self, nbytes: int, memory: memoryview | None) -> Region: ...

    def find(self, region_id: bytes) -> LocalRegion | None:
        """The region that peers may put into through frames."""
        ...

    def attach(self, channel: ZmqChannel) -> None:
        """Called for each new channel."""
        ...

    async def open(self, channel: ZmqChannel, descriptor: bytes) -> RemoteRegion: ...

    def close(self) -> None: ...


class ZmqRemoteRegion(RemoteRegion):
    def __init__(self, channel: ZmqChannel, name: RegionName) -> None:
        self.nbytes = name.nbytes
        self._channel = channel
        self._region_id = name.region_id

    async def put(self, key: int, writes: Sequence[Write]) -> None:
        self._channel.check_open()
        plan = plan_put(key, writes, self.nbytes)
        if plan.nbytes:
            await self._channel.place(self._region_id, key, plan)


class ZmqRegions:
    """Anonymous memory; puts come as frames and are copied once, from the frame into place."""

    def __init__(self) -> None:
        self._table = RegionTable(_MAGIC)

    def create(self, nbytes: int, memory: memoryview | None) -> Region:
        return self._table.create(nbytes, memory)

    def find(self, region_id: bytes) -> LocalRegion | None:
        return self._table.find(region_id)

    def attach(self, channel: ZmqChannel) -> None:
        pass  # the channel itself carries puts

    async def open(self, channel: ZmqChannel, descriptor: bytes) -> RemoteRegion:
        name = decode_descriptor(_MAGIC, descriptor)
        if not await channel.find_remote(name):
            raise TransportError("the peer has no such region")
        return ZmqRemoteRegion(channel, name)

    def close(self) -> None:
        self._table.close()
