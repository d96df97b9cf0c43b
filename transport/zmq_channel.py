"""A channel over ZeroMQ frames, the same for both ends; a `Link` carries its frames.

OPEN ── close() ──▶ CLOSING ── BYE_ACK, or liveness_s over ──▶ ENDED
  └── abort(), BYE or RESET from the peer, garbage, silence, connection lost ──▶ ENDED

Sends take turns, and so do puts; a message may go between two pieces of a put, so that nobody waits for bulk data. A put
holds its turn only until its last piece is handed to ZeroMQ: the next one is on its way before the first is acknowledged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto

import zmq

from transport.base import Allocate, Buffer, Channel, Message, RemoteRegion
from transport.buffers import PutPlan, as_bytes, fill_allocated
from transport.errors import ChannelClosed, PlacementRefused
from transport.flow import CreditWindow, GrantAccount, Inbox, Turn, cost_of
from transport.limits import check_message
from transport.liveness import Liveness, Verdict
from transport.pending import Pending
from transport.regions import RegionName
from transport.zmq_frames import (
    INLINE_BYTES,
    Aside,
    Body,
    Bye,
    ByeAck,
    FrameError,
    Limits,
    MessageHead,
    Pulse,
    PutBegin,
    PutData,
    PutDone,
    RegionAnswer,
    RegionAsk,
    Reset,
    encode,
)
from transport.zmq_incoming import Incoming, Item, buffers_of, decode_alone
from transport.zmq_placement import MAX_PUT_RANGES, FindRegion, Placer, put_frames
from transport.zmq_sockets import Link, LinkLost, Part

PIECE_BYTES = 4 << 20
"""Largest part of a put in one item: the owner's loop copies it in a millisecond. An item costs about 80 µs of CPU on both
sides, most of it for waking ZeroMQ's thread."""
_GRANT_DELAY_S = 0.002
_ABORT_LINGER_MS = 200


class State(Enum):
    OPEN = auto()
    CLOSING = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True, eq=False)
class _Received:
    header: bytes
    buffers: tuple[memoryview, ...]
    cost: int


OpenRegion = Callable[["ZmqChannel", bytes], Awaitable[RemoteRegion]]


class ZmqChannel(Channel):
    def __init__(
        self,
        *,
        local: str,
        peer: str,
        channel_id: bytes,
        link: Link,
        own: Limits,
        theirs: Limits,
        find_region: FindRegion,
        open_region: OpenRegion,
        on_end: Callable[[ZmqChannel], None],
    ) -> None:
        self.local = local
        self.peer = peer
        self.channel_id = channel_id
        self.liveness_s = own.liveness_s
        self.max_in_flight_bytes = min(own.max_in_flight_bytes, theirs.max_in_flight_bytes)
        self.put_turn = asyncio.Lock()
        self._send_turn = asyncio.Lock()
        self._reader = Turn("receiving")
        self._loop = asyncio.get_running_loop()
        self._link = link
        self._liveness = Liveness(own.liveness_s, theirs.liveness_s, self._loop.time())
        self._max_message_bytes = min(own.max_message_bytes, theirs.max_message_bytes)
        self._limit = self.max_in_flight_bytes
        self._credit = CreditWindow(self._limit)
        self._inbox: Inbox[_Received] = Inbox()
        self._grants = GrantAccount(self._limit)
        self._incoming = Incoming(self._grants, self._limit, self._max_message_bytes)
        self._grant_timer: asyncio.TimerHandle | None = None
        self._placer = Placer(find_region)
        self._puts: Pending[PutDone] = Pending()
        self._asks: Pending[bool] = Pending()
        self.on_aside: Callable[[memoryview], None] | None = None
        self._open_region = open_region
        self._fences: list[Callable[[], None]] = []
        self._on_end = on_end
        self._state = State.OPEN
        self._reason = ""
        self._closed: asyncio.Future[None] | None = None
        self._look_timer = self._loop.call_later(self._liveness.interval_s / 2, self._look)

    # The application's side

    async def send(self, header: bytes, buffers: Sequence[Buffer] = ()) -> None:
        views = [as_bytes(buffer) for buffer in buffers]
        cost = cost_of(check_message(header, views, self._max_message_bytes), self._limit)
        sizes = tuple(map(len, views))
        small = sum(sizes) <= INLINE_BYTES
        async with self._send_turn:
            self.check_open()
            with self._aborting("a send was cancelled"):
                await self._credit.take(cost)
                head = MessageHead(bytes(header), sizes, b"".join(views) if small else b"")
                trackers = self._post(head, () if small else [view for view in views if len(view)])
        with self._aborting("a send was cancelled"):
            await self._until_released(trackers)

    async def recv(self, allocate: Allocate | None = None) -> Message:
        with self._reader:
            received = await self._inbox.first()
            buffers = received.buffers if allocate is None else await fill_allocated(received.buffers, allocate)
            self._inbox.remove(received)
            self._consumed(received.cost)
            return Message(received.header, buffers)

    async def open_region(self, descriptor: bytes) -> RemoteRegion:
        self.check_open()
        return await self._open_region(self, descriptor)

    async def close(self) -> None:
        if self._state is State.OPEN:
            self._state = State.CLOSING
            self._stop("closed by this side")
            self._inbox.discard(self._reason)
            self._closed = self._loop.create_future()
            self._try_post(Bye())
        if self._state is State.ENDED or self._closed is None:
            self._inbox.discard(self._reason)
            return
        try:
            await asyncio.wait([self._closed], timeout=self._liveness.liveness_s)
        except asyncio.CancelledError:
            self._end("a close was cancelled")
            raise
        self._end(self._reason, notify=not self._closed.done())

    def abort(self) -> None:
        self._end("aborted by this side")
        self._inbox.discard(self._reason)

    # What remote regions need

    def check_open(self) -> None:
        """
        Raises:
            ChannelClosed: with the reason.
        """
        if self._state is not State.OPEN:
            raise ChannelClosed(self._reason)

    def add_fence(self, fence: Callable[[], None]) -> None:
        """`fence` runs when the channel ends, before the peer hears of it: afterwards nothing of it may be written."""
        self._fences.append(fence)

    def fail_later(self, reason: str, still_wanted: Callable[[], bool]) -> None:
        """Fails in `liveness_s`, unless that is of no use any more."""
        self._loop.call_later(self.liveness_s, lambda: self.fail(reason) if still_wanted() else None)

    def tell_aside(self, payload: bytes) -> None:
        """Nothing is sent when the channel has ended: its fences have run, or do so at once."""
        self._try_post(Aside(payload))

    async def find_remote(self, name: RegionName) -> bool:
        """Whether the peer has this region.

        Raises:
            ChannelClosed: it ended before the peer answered.
        """
        self.check_open()
        with self._asks.ask() as (ask_id, answer):
            self._post(RegionAsk(ask_id, name.region_id, name.nbytes))
            found = await answer
        if found is None:
            raise ChannelClosed(self._reason)
        return found

    async def place(self, region_id: bytes, key: int, plan: PutPlan) -> None:
        """Sends a put in pieces and waits until the owner has all of it in place.

        Raises:
            PlacementRefused: the owner refused.
            ChannelClosed: the channel ended first.
        """
        if len(plan.ranges) > MAX_PUT_RANGES:
            raise ValueError(f"a put of {len(plan.ranges)} separate ranges exceeds {MAX_PUT_RANGES}")
        trackers: list[zmq.MessageTracker] = []
        with self._puts.ask() as (put_id, answer):
            async with self.put_turn:
                self.check_open()
                with self._aborting("a put was cancelled"):
                    trackers += self._post(PutBegin(put_id, region_id, key, plan.ranges))
                    for piece in plan.pieces(min(PIECE_BYTES, self._limit // 4)):
                        await self._credit.take(cost_of(sum(map(len, piece)), self._limit))
                        if answer.done():
                            break
                        trackers += self._post(*put_frames(put_id, piece))
            with self._aborting("a put was cancelled"):
                done = await answer
                if done is None:
                    raise ChannelClosed(self._reason)
                await self._until_released(trackers)
        if done.refusal is not None:
            raise PlacementRefused(done.refusal)

    @contextmanager
    def _aborting(self, reason: str) -> Iterator[None]:
        """Cancelled in here, the channel ends: what was begun cannot be taken back."""
        try:
            yield
        except asyncio.CancelledError:
            self._end(reason)
            raise

    # The socket's side

    def deliver(self, frames: Sequence[zmq.Frame]) -> None:
        """What came from the peer, in order: one frame. Garbage ends the channel."""
        if self._state is State.ENDED:
            return
        self._liveness.heard(self._loop.time())
        try:
            item = self._take_in(frames)
            if item is not None:
                self._handle(item)
        except FrameError as error:
            self.fail(f"protocol violation by the peer: {error}")

    def _take_in(self, frames: Sequence[zmq.Frame]) -> Item | None:
        if self._incoming.is_open and len(frames) == 1:
            return self._incoming.add(frames[0].buffer)
        head = decode_alone(frames)
        if head.channel_id != self.channel_id:
            raise FrameError("a frame of another channel")
        if head.granted and not self._credit.give(head.granted):
            raise FrameError("more bytes granted than were sent")
        return self._incoming.begin(head)

    def fail(self, reason: str) -> None:
        """Ends the channel and tells the peer why."""
        self._end(reason)

    def _handle(self, item: Item) -> None:
        body = item.head.body
        match body:
            case Reset():
                self._end(f"aborted by the peer: {body.reason}", notify=False)
            case Bye():
                self._try_post(ByeAck())
                if self._state is State.CLOSING:
                    self._closing_confirmed()
                else:
                    self._inbox.finish("closed by the peer")
                    self._end("closed by the peer", notify=False, keep_inbox=True)
            case ByeAck():
                self._closing_confirmed()
            case Pulse():
                pass
            case PutDone():
                self._puts.answer(body.put_id, body)
            case RegionAnswer():
                self._asks.answer(body.ask_id, body.found)
            case _ if self._state is State.CLOSING:
                pass  # whatever was on its way when this side closed
            case MessageHead():
                self._inbox.push(_Received(body.header, buffers_of(body, item.tail), item.cost))
            case PutBegin():
                self._try_post(self._placer.begin(body))
            case PutData():
                done = self._placer.data(body, (memoryview(body.inline), *item.tail))
                self._consumed(item.cost)
                self._try_post(done)
            case RegionAsk():
                self._try_post(RegionAnswer(body.ask_id, self._placer.knows(body.region_id, body.nbytes)))
            case Aside() if self.on_aside is not None:
                self.on_aside(memoryview(body.payload))
            case _:
                raise FrameError(f"{type(body).__name__} on an open channel")

    def _consumed(self, cost: int) -> None:
        """Grants at once when much has gathered, otherwise with the next frame or a moment later."""
        self._grants.consumed(cost)
        if self._grants.urgent:
            self._grant()
        elif self._grant_timer is None and self._state is State.OPEN:
            self._grant_timer = self._loop.call_later(_GRANT_DELAY_S, self._grant)

    def _grant(self) -> None:
        if self._grant_timer is not None:
            self._grant_timer.cancel()
            self._grant_timer = None
        if self._grants.pending:
            self._try_post(Pulse())

    def _closing_confirmed(self) -> None:
        if self._closed is not None and not self._closed.done():
            self._closed.set_result(None)

    # Frames out

    def _post(self, body: Body, tail: Sequence[Part] = ()) -> list[zmq.MessageTracker]:
        """
        Raises:
            ChannelClosed: the connection is lost; the channel has ended.
        """
        try:
            trackers = self._link.send(encode(self.channel_id, self._grants.take(), body), tail)
        except LinkLost as error:
            self._end("the connection to the peer is lost", notify=False)
            raise ChannelClosed(self._reason) from error
        self._liveness.sent(self._loop.time())
        return trackers

    def _try_post(self, body: Body | None) -> None:
        if body is not None and self._state is not State.ENDED:
            try:
                self._post(body)
            except ChannelClosed:
                return  # it has ended, with the reason kept; there is no caller to tell

    async def _until_released(self, trackers: list[zmq.MessageTracker]) -> None:
        """Until ZeroMQ needs the source buffers no more. It tells by a flag only, hence the growing naps."""
        nap_s = 0.0
        while not all(tracker.done for tracker in trackers):
            await asyncio.sleep(nap_s)
            nap_s = min(0.002, nap_s + 0.0001)
            if self._state is State.ENDED:
                raise ChannelClosed(self._reason)

    # Life and end

    def _look(self) -> None:
        verdict = self._liveness.look(self._loop.time())
        if verdict is Verdict.DEAD:
            self._end(f"the peer was silent for {self._liveness.liveness_s} s")
            return
        if verdict is Verdict.PULSE:
            self._try_post(Pulse())
        if self._state is not State.ENDED:
            self._look_timer = self._loop.call_later(self._liveness.interval_s / 2, self._look)

    def _stop(self, reason: str) -> None:
        """Nothing more is written by this side, and whoever waits for it hears so."""
        self._reason = reason
        for fence in self._fences:
            fence()
        self._fences.clear()
        self._credit.end(reason)
        self._puts.end()
        self._asks.end()

    def _end(self, reason: str, *, notify: bool = True, keep_inbox: bool = False) -> None:
        if self._state is State.ENDED:
            return
        self._state = State.ENDED
        self._stop(reason)
        if not keep_inbox:
            self._inbox.discard(reason)
        linger_ms = _ABORT_LINGER_MS
        if notify:
            try:
                self._link.send(encode(self.channel_id, 0, Reset(reason)))
            except LinkLost:
                linger_ms = 0
            if self._credit.in_flight:
                linger_ms = 0  # bulk data is dropped with its notice; the peer sees the connection end
        self._link.close(linger_ms)
        self._look_timer.cancel()
        if self._grant_timer is not None:
            self._grant_timer.cancel()
        self._closing_confirmed()
        self._on_end(self)
