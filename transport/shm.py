"""Shared memory: messages go over ZeroMQ, puts are one copy by the writer, straight into the owner's memory.

`receiver_copies` is False: after `close_window` a writer that looked a moment ago may still be copying one slice. It stops
before its channel ends or its `put` returns, so the owner may reuse the memory when it has heard from the writer, or its
channel has ended because the writer closed it, aborted it or died. (A process that is stopped by a debugger for longer than
`liveness_s` is silent but not dead.)
"""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from collections.abc import Callable, Sequence

from transport.base import ByteRange, Region, RemoteRegion, Write
from transport.buffers import PutPlan, copy, plan_put
from transport.errors import ChannelClosed, PlacementRefused, TransportError
from transport.memory import close_when_unused
from transport.options import TransportOptions
from transport.regions import LocalRegion
from transport.shm_segment import Segment, SegmentName, map_segment, unlink_orphans
from transport.shm_windows import CONTROL_BYTES, OwnerWindows, TableBusy, WriterWindows
from transport.zmq_channel import ZmqChannel
from transport.zmq_transport import ZmqTransport

_MAGIC = b"KVRSHMR1"
_DESCRIPTOR = struct.Struct("<8sQQH")  # magic, inode, bytes of the region, length of the name that follows
_INLINE_BYTES = 2 << 20  # below, handing the copy to a thread costs as much as the copy, less than half a millisecond
# Between slices a writer looks whether it may go on. A slice is long enough for the C library to write around the cache, as
# it does above three quarters of it: twice as fast for bulk data. Most puts are shorter: a run of adjacent blocks.
_SLICE_BYTES = 64 << 20
_LOOK_AGAIN_S = 0.0005
_PATIENCE_S = 2.0  # with an owner that lost its core while it changed its window table


def encode_descriptor(name: SegmentName) -> bytes:
    text = name.name.encode()
    return _DESCRIPTOR.pack(_MAGIC, name.inode, name.nbytes - CONTROL_BYTES, len(text)) + text


def decode_descriptor(descriptor: bytes) -> SegmentName:
    """
    Raises:
        TransportError: not a descriptor of a shared-memory region.
    """
    if len(descriptor) < _DESCRIPTOR.size or descriptor[:8] != _MAGIC:
        raise TransportError(f"not a descriptor of a shared-memory region ({len(descriptor)} bytes)")
    _, inode, nbytes, name_length = _DESCRIPTOR.unpack_from(descriptor)
    text = descriptor[_DESCRIPTOR.size :]
    if len(text) != name_length or not text.isascii() or not 0 < nbytes < 2**62:
        raise TransportError("the descriptor of a shared-memory region is damaged")
    return SegmentName(text.decode("ascii"), inode, nbytes + CONTROL_BYTES)


class ShmRegion(Region):
    receiver_copies = False

    def __init__(self, nbytes: int, forget: Callable[[ShmRegion], None]) -> None:
        self._segment = Segment.create(CONTROL_BYTES + nbytes)
        self._windows = OwnerWindows(self._segment.map, nbytes)
        self._memory = memoryview(self._segment.map)[CONTROL_BYTES:]
        self._forget = forget
        self._open = True

    @property
    def memory(self) -> memoryview:
        return self._memory

    def descriptor(self) -> bytes:
        return encode_descriptor(self._segment.name)

    def open_window(self, key: int, ranges: Sequence[ByteRange]) -> None:
        if not self._open:
            raise TransportError("the region is closed")
        self._windows.open(key, ranges)

    def close_window(self, key: int) -> None:
        if self._open:
            self._windows.close(key)

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._windows.detach()
        self._memory.release()
        self._segment.close()
        self._forget(self)


class _ChannelEnded(Exception):
    """Nothing more is written."""


class ShmRemoteRegion(RemoteRegion):
    """A peer's segment, mapped. The mapping ends with the channel, before the peer hears of the end."""

    def __init__(self, channel: ZmqChannel, name: SegmentName) -> None:
        self.nbytes = name.nbytes - CONTROL_BYTES
        self._channel = channel
        self._map = map_segment(name)
        try:
            self._windows = WriterWindows(self._map)
        except TransportError:
            close_when_unused(self._map)
            raise
        self._memory = memoryview(self._map)[CONTROL_BYTES:]
        self._slice_lock = threading.Lock()
        self._stopped = False
        channel.add_fence(self._stop)

    async def put(self, key: int, writes: Sequence[Write]) -> None:
        self._channel.check_open()
        plan = plan_put(key, writes, self.nbytes)
        if not plan.nbytes:
            return
        async with self._channel.put_turn:
            self._channel.check_open()
            try:
                await self._copy_anyhow(key, plan)
            except TableBusy:
                message = f"the owner's window table did not come to rest within {_PATIENCE_S:g} s"
                raise PlacementRefused(message) from None
            except _ChannelEnded:
                self._channel.check_open()
                raise ChannelClosed("the channel ended during the put") from None

    async def _copy_anyhow(self, key: int, plan: PutPlan) -> None:
        if plan.nbytes <= _INLINE_BYTES:
            try:
                self._copy(key, plan, patience_s=0.0)
                return
            except TableBusy:
                pass  # to be waited for, and that not on the loop; what was written is written again
        await self._copy_in_thread(key, plan)

    async def _copy_in_thread(self, key: int, plan: PutPlan) -> None:
        copying = asyncio.get_running_loop().run_in_executor(None, self._copy, key, plan, _PATIENCE_S)
        try:
            await asyncio.shield(copying)
        except asyncio.CancelledError:
            copying.add_done_callback(_consume)
            self._channel.fail("a put was cancelled")  # its fence waits for the slice in progress
            raise

    def _copy(self, key: int, plan: PutPlan, patience_s: float) -> None:
        """
        Raises:
            PlacementRefused: the window is not open (any more) for all of the put.
            TableBusy: it could not be seen within `patience_s` whether it is.
            _ChannelEnded: before the last slice.
        """
        give_up_at = time.monotonic() + patience_s
        sequence: int | None = None
        for offset, source in plan.sources:
            for start in range(0, len(source), _SLICE_BYTES):
                part = source[start : start + _SLICE_BYTES]
                while True:
                    try:
                        sequence = self._copy_slice(key, plan, offset + start, part, sequence)
                        break
                    except TableBusy:
                        if time.monotonic() >= give_up_at:
                            raise
                        time.sleep(_LOOK_AGAIN_S)

    def _copy_slice(self, key: int, plan: PutPlan, offset: int, part: memoryview, sequence: int | None) -> int:
        """Look at the window, unless the table is as it was at the slice before, whose number is `sequence`; then copy.

        Returns:
            The number under which the table was found open.
        """
        with self._slice_lock:
            if self._stopped:
                raise _ChannelEnded
            if sequence is None or sequence != self._windows.sequence:
                sequence = self._windows.admit(key, plan.ranges)
            copy(self._memory[offset : offset + len(part)], part)
            return sequence

    def _stop(self) -> None:
        """No byte is written after this. Waits for the slice in progress: milliseconds, where it is a long one."""
        with self._slice_lock:
            self._stopped = True
            self._windows.detach()
            self._memory.release()
            close_when_unused(self._map)


class ShmRegions:
    def __init__(self) -> None:
        self._regions: set[ShmRegion] = set()

    def create(self, nbytes: int, memory: memoryview | None) -> Region:
        if memory is not None:
            raise ValueError("memory cannot be given: shared-memory regions are segments that the transport makes")
        if nbytes <= 0:
            raise ValueError(f"nbytes must be positive, not {nbytes}")
        unlink_orphans()
        region = ShmRegion(nbytes, self._regions.discard)
        self._regions.add(region)
        return region

    def find(self, region_id: bytes) -> LocalRegion | None:
        return None  # nobody puts through frames

    def attach(self, channel: ZmqChannel) -> None:
        pass  # a mapping is made with each region that is opened

    async def open(self, channel: ZmqChannel, descriptor: bytes) -> RemoteRegion:
        return ShmRemoteRegion(channel, decode_descriptor(descriptor))

    def close(self) -> None:
        for region in list(self._regions):
            region.close()


class ShmTransport(ZmqTransport):
    """Addresses are ZeroMQ's: ipc://path or tcp://host:port of this very machine."""

    scheme = "shm"
    owns_memory = True

    def __init__(self, options: TransportOptions | None = None) -> None:
        super().__init__(options, ShmRegions())


def _consume(copying: asyncio.Future[None]) -> None:
    if not copying.cancelled():
        copying.exception()
