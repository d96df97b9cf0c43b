"""Regions into which this process itself copies what peers put (inproc, ZeroMQ)."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from transport.base import ByteRange, Region
from transport.errors import PlacementRefused, TransportError
from transport.memory import AnonymousMemory, LentMemory
from transport.windows import Window, WindowTable

REGION_ID_BYTES = 16
_DESCRIPTOR = struct.Struct(f"<8s{REGION_ID_BYTES}sQ")  # magic, region id, bytes


@dataclass(frozen=True, slots=True)
class RegionName:
    region_id: bytes
    nbytes: int


def encode_descriptor(magic: bytes, name: RegionName) -> bytes:
    return _DESCRIPTOR.pack(magic, name.region_id, name.nbytes)


def decode_descriptor(magic: bytes, descriptor: bytes) -> RegionName:
    """
    Raises:
        TransportError: not a descriptor of this kind of region.
    """
    if len(descriptor) != _DESCRIPTOR.size or descriptor[:8] != magic:
        raise TransportError(f"not a region descriptor of this transport ({len(descriptor)} bytes)")
    _, region_id, nbytes = _DESCRIPTOR.unpack(descriptor)
    return RegionName(region_id, nbytes)


class LocalRegion(Region):
    """Memory of this process, its own or lent. All copying happens on the owner's event loop, so `close_window` ends every
    write at once."""

    receiver_copies = True

    def __init__(self, nbytes: int, memory: memoryview | None, magic: bytes, table: RegionTable) -> None:
        self._memory = AnonymousMemory(nbytes) if memory is None else LentMemory(nbytes, memory)
        self._windows = WindowTable(nbytes)
        self._magic = magic
        self._table = table
        self.name = RegionName(secrets.token_bytes(REGION_ID_BYTES), nbytes)
        self._open = True

    @property
    def memory(self) -> memoryview:
        return self._memory.view

    def descriptor(self) -> bytes:
        return encode_descriptor(self._magic, self.name)

    def open_window(self, key: int, ranges: Sequence[ByteRange]) -> None:
        if not self._open:
            raise TransportError("the region is closed")
        self._windows.open(key, ranges)

    def close_window(self, key: int) -> None:
        self._windows.close(key)

    def admit(self, key: int, ranges: Sequence[ByteRange]) -> Window:
        """
        Raises:
            PlacementRefused: the region is closed, or no open window of `key` holds all of `ranges`.
        """
        if not self._open:
            raise PlacementRefused("the region is closed")
        return self._windows.admit(key, ranges)

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._windows.close_all()
        self._table.forget(self)
        self._memory.close()


class RegionTable:
    """The regions of one transport, by id; owned until they are closed."""

    def __init__(self, magic: bytes) -> None:
        self._magic = magic
        self._regions: dict[bytes, LocalRegion] = {}

    def __len__(self) -> int:
        return len(self._regions)

    def create(self, nbytes: int, memory: memoryview | None) -> LocalRegion:
        region = LocalRegion(nbytes, memory, self._magic, self)
        self._regions[region.name.region_id] = region
        return region

    def find(self, region_id: bytes) -> LocalRegion | None:
        return self._regions.get(region_id)

    def forget(self, region: LocalRegion) -> None:
        self._regions.pop(region.name.region_id, None)

    def close(self) -> None:
        for region in list(self._regions.values()):
            region.close()
