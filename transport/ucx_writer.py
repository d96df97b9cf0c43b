"""The writing end of a channel's UCX lane: asks for it, puts through it, and asks anew when the owner had to close it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transport.base import ByteRange, RemoteRegion, Write
from transport.buffers import PutPlan, plan_put
from transport.errors import ChannelClosed, PlacementRefused, TransportError
from transport.regions import RegionName
from transport.ucx import Lane, UcxContext
from transport.ucx_frames import MAX_PIECES, Done, Grant, Open, Opened, Outcome, Put, encode_aside
from transport.zmq_channel import ZmqChannel
from transport.zmq_frames import FrameError

PIECE_BYTES = 4 << 20
PIECE_BITS = 20  # of a tag; MAX_PIECES fits


def tag_of(put_id: int, piece: int) -> int:
    return (put_id << PIECE_BITS | piece) & (2**64 - 1)


@dataclass(slots=True)
class _Running:
    """A put that the owner knows of."""

    sources: Sequence[memoryview]
    outcome: asyncio.Future[Done | None]  # None: the channel ended
    num_sent: int = 0
    num_finished: int = 0  # UCX needs their sources no more
    done: Done | None = None

    def finish(self, _error: str | None) -> None:
        self.num_finished += 1
        self.settle()

    def settle(self) -> None:
        if self.done is not None and self.num_finished == self.num_sent and not self.outcome.done():
            self.outcome.set_result(self.done)


class UcxWriter:
    """One per channel. Puts are told to the owner in the order of their calls and run side by side."""

    def __init__(self, channel: ZmqChannel, context: UcxContext) -> None:
        self._channel = channel
        self._context = context
        self._lane: Lane | None = None
        self._lane_number = 0
        self._answer: asyncio.Future[Opened | None] | None = None
        self._running: dict[int, _Running] = {}
        self._last_put_id = 0
        self._ended = False

    # What the application asks for

    async def open(self, name: RegionName) -> None:
        """
        Raises:
            TransportError: UCX does not reach the owner.
        """
        async with self._channel.put_turn:
            try:
                await self._need_lane(name)
            except asyncio.CancelledError:
                self._drop_lane()
                raise

    async def put(self, name: RegionName, key: int, plan: PutPlan) -> None:
        """
        Raises:
            PlacementRefused: the owner refused.
            ChannelClosed: the channel ended first.
            TransportError: UCX does not reach the owner.
        """
        pieces, sources = _cut(plan, min(PIECE_BYTES, self._channel.max_in_flight_bytes // 4))
        if len(pieces) > MAX_PIECES:
            raise ValueError(f"a put of {len(pieces)} pieces exceeds {MAX_PIECES}")
        while True:
            async with self._channel.put_turn:
                self._channel.check_open()
                try:
                    await self._need_lane(name)
                except asyncio.CancelledError:
                    self._channel.fail("a put was cancelled")
                    raise
                self._last_put_id += 1
                put_id = self._last_put_id
                running = _Running(sources, asyncio.get_running_loop().create_future())
                self._running[put_id] = running
                self._channel.tell_aside(encode_aside(Put(put_id, self._lane_number, name.region_id, key, pieces)))
            try:
                done = await running.outcome
            except asyncio.CancelledError:
                self._channel.fail("a put was cancelled")
                raise
            finally:
                del self._running[put_id]
            if done is None:
                self._channel.check_open()
                raise ChannelClosed("the channel ended during the put")
            if done.outcome is Outcome.REFUSED:
                raise PlacementRefused(done.reason)
            if done.outcome is Outcome.PLACED:
                return

    @property
    def path(self) -> str:
        return "" if self._lane is None else ", ".join(self._lane.transports)

    # What the owner says

    def opened(self, opened: Opened) -> None:
        if self._answer is not None and not self._answer.done() and opened.lane == self._lane_number:
            self._answer.set_result(opened)

    def granted(self, grant: Grant) -> None:
        """
        Raises:
            FrameError: more than the put has.
        """
        running = self._running.get(grant.put_id)
        if running is None or self._lane is None:
            return  # its task was cancelled, and the channel is about to end
        first, end = running.num_sent, running.num_sent + grant.count
        if end > len(running.sources):
            raise FrameError(f"put {grant.put_id} has no {grant.count} more pieces")
        running.num_sent = end
        for number in range(first, end):
            self._lane.send(tag_of(grant.put_id, number), running.sources[number], running.finish)

    def done(self, done: Done) -> None:
        """
        Raises:
            FrameError: placed, but not all of it was sent.
        """
        running = self._running.get(done.put_id)
        if running is None or running.outcome.done():
            return
        if done.outcome is Outcome.PLACED and running.num_sent < len(running.sources):
            raise FrameError(f"put {done.put_id} is done before it was sent")
        running.done = done
        if done.outcome is Outcome.AGAIN:
            self._drop_lane()
            running.outcome.set_result(done)
        else:
            running.settle()

    def end(self) -> None:
        """The channel's fence: no piece is sent any more. What was, comes to nothing when the owner closes its end."""
        self._ended = True
        self._drop_lane()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)
        for running in self._running.values():
            if not running.outcome.done():
                running.outcome.set_result(None)

    # The lane

    async def _need_lane(self, name: RegionName) -> None:
        if self._lane is not None:
            return
        self._lane_number += 1
        lane = self._lane = Lane(self._context, self._broken)
        self._answer = asyncio.get_running_loop().create_future()
        self._channel.tell_aside(encode_aside(Open(self._lane_number, self._context.version, name.region_id, lane.address)))
        opened = await self._answer
        self._answer = None
        if opened is None or self._ended:
            self._channel.check_open()
            raise ChannelClosed("the channel ended during the put")
        try:
            if not opened.address:
                raise TransportError(f"the owner opened no lane: {opened.reason}")
            if opened.version != self._context.version:
                raise TransportError(f"UCX {opened.version} there, {self._context.version} here")
            lane.connect(opened.address)
        except TransportError:
            self._drop_lane()
            raise

    def _drop_lane(self) -> None:
        if self._lane is not None:
            self._lane.retire(self._channel.liveness_s)
            self._lane = None

    def _broken(self, reason: str) -> None:
        """The owner may have closed the lane on purpose and says so in a moment; otherwise the channel has no use."""
        lane = self._lane
        self._channel.fail_later(f"UCX: {reason}", lambda: lane is not None and self._lane is lane)


class UcxRemoteRegion(RemoteRegion):
    def __init__(self, channel: ZmqChannel, name: RegionName, writer: UcxWriter) -> None:
        self.nbytes = name.nbytes
        self._channel = channel
        self._name = name
        self._writer = writer

    @property
    def path(self) -> str:
        return self._writer.path

    async def put(self, key: int, writes: Sequence[Write]) -> None:
        self._channel.check_open()
        plan = plan_put(key, writes, self.nbytes)
        if plan.nbytes:
            await self._writer.put(self._name, key, plan)


def _cut(plan: PutPlan, nbytes: int) -> tuple[tuple[ByteRange, ...], list[memoryview]]:
    pieces: list[ByteRange] = []
    sources: list[memoryview] = []
    for offset, part in _parts(plan, nbytes):
        pieces.append(ByteRange(offset, len(part)))
        sources.append(part)
    return tuple(pieces), sources


def _parts(plan: PutPlan, nbytes: int) -> Iterator[tuple[int, memoryview]]:
    for offset, source in plan.sources:
        for start in range(0, len(source), nbytes):
            yield offset + start, source[start : start + nbytes]
