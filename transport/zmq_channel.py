"""A channel over ZeroMQ frames, the same for both ends; a `Link` carries its frames.

OPEN ── close() ──▶ CLOSING ── BYE_ACK, or liveness_s over ──▶ ENDED
  └── abort(), BYE or RESET from the peer, garbage, silence, connection lost ──▶ ENDED
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import zmq

from transport.base import Allocate, Buffer, Channel, Message, RemoteRegion
from transport.buffers import PutPlan, as_bytes, fill_allocated
from transport.errors import ChannelClosed, PlacementRefused
from transport.flow import CreditWindow, GrantAccount, Inbox, Turn, cost_of
from transport.limits import check_message
from transport.liveness import Liveness, Verdict
from transport.regions import RegionName
from transport.zmq_frames import (
    Body,
    Bye,
    ByeAck,
    FrameError,
    Head,
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
from transport.zmq_placement import FindRegion, Placer
from transport.zmq_sockets import Link, LinkLost, Part

PIECE_BYTES = 1 << 20
"""Largest part of a put in one frame: small enough that the owner's loop copies it in a fraction of a millisecond."""
MAX_PUT_RANGES = 1 << 18
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


@dataclass(slots=True)
class _PendingPut:
    put_id: int
    outcome: asyncio.Future[PutDone | None]  # None: the channel ended


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
        self.writer = Turn("sending")
        self._reader = Turn("receiving")
        self._loop = asyncio.get_running_loop()
        self._link = link
        self._liveness = Liveness(own.liveness_s, theirs.liveness_s, self._loop.time())
        self._max_message_bytes = min(own.max_message_bytes, theirs.max_message_bytes)
        self._limit = min(own.max_in_flight_bytes, theirs.max_in_flight_bytes)
        self._credit = CreditWindow(self._limit)
        self._inbox: Inbox[_Received] = Inbox()
        self._grants = GrantAccount(self._limit)
        self._grant_timer: asyncio.TimerHandle | None = None
        self._placer = Placer(find_region)
        self._put: _PendingPut | None = None
        self._last_put_id = 0
        self._asks: dict[int, asyncio.Future[bool | None]] = {}
        self._last_ask_id = 0
        self._open_region = open_region
        self._fences: list[Callable[[], None]] = []
        self._on_end = on_end
        self._state = State.OPEN
        self._reason = ""
        self._closed: asyncio.Future[None] | None = None
        self._look_timer = self._loop.call_later(self._liveness.interval_s / 2, self._look)

    # The application's side

    async def send(self, header: bytes, buffers: Sequence[Buffer] = ()) -> None:
        with self.writer:
            self.check_open()
            views = [as_bytes(buffer) for buffer in buffers]
            cost = cost_of(check_message(header, views, self._max_message_bytes), self._limit)
            try:
                await self._credit.take(cost)
                trackers = self._post(MessageHead(len(views)), [bytes(header), *views])
                await self._until_released(trackers)
            except asyncio.CancelledError:
                self._end("a send was cancelled")
                raise

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

    async def find_remote(self, name: RegionName) -> bool:
        """Whether the peer has this region.

        Raises:
            ChannelClosed: it ended before the peer answered.
        """
        self.check_open()
        self._last_ask_id += 1
        ask_id = self._last_ask_id
        answer = self._asks[ask_id] = self._loop.create_future()
        try:
            self._post(RegionAsk(ask_id, name.region_id, name.nbytes))
            found: bool | None = await answer
        finally:
            del self._asks[ask_id]
        if found is None:
            raise ChannelClosed(self._reason)
        return found

    async def place(self, region_id: bytes, key: int, plan: PutPlan) -> None:
        """Sends a put in pieces and waits until the owner has all of it in place.

        Raises:
            PlacementRefused: the owner refused.
            ChannelClosed: the channel ended first.
        """
        with self.writer:
            self.check_open()
            if len(plan.ranges) > MAX_PUT_RANGES:
                raise ValueError(f"a put of {len(plan.ranges)} separate ranges exceeds {MAX_PUT_RANGES}")
            self._last_put_id += 1
            put = self._put = _PendingPut(self._last_put_id, self._loop.create_future())
            try:
                await self._send_pieces(put, region_id, key, plan)
            except asyncio.CancelledError:
                self._end("a put was cancelled")
                raise
            finally:
                self._put = None
            done = put.outcome.result()
            if done is None:
                raise ChannelClosed(self._reason)
            if done.refusal is not None:
                raise PlacementRefused(done.refusal)

    async def _send_pieces(self, put: _PendingPut, region_id: bytes, key: int, plan: PutPlan) -> None:
        trackers = self._post(PutBegin(put.put_id, region_id, key, plan.ranges))
        for piece in plan.pieces(min(PIECE_BYTES, self._limit // 4)):
            await self._credit.take(cost_of(sum(map(len, piece)), self._limit))
            if put.outcome.done():
                break
            trackers += self._post(PutData(put.put_id), piece)
        await put.outcome
        await self._until_released(trackers)

    # The socket's side

    def deliver(self, head: Head, payload: Sequence[zmq.Frame]) -> None:
        """One item from the peer, in order. Garbage ends the channel."""
        if self._state is State.ENDED:
            return
        self._liveness.heard(self._loop.time())
        try:
            if head.granted and not self._credit.give(head.granted):
                raise FrameError("more bytes granted than were sent")
            self._handle(head.body, [frame.buffer for frame in payload])
        except FrameError as error:
            self.fail(f"protocol violation by the peer: {error}")

    def fail(self, reason: str) -> None:
        """Ends the channel and tells the peer why."""
        self._end(reason)

    def _handle(self, body: Body, payload: list[memoryview]) -> None:
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
                if self._put is not None and self._put.put_id == body.put_id and not self._put.outcome.done():
                    self._put.outcome.set_result(body)
            case RegionAnswer():
                answer = self._asks.get(body.ask_id)
                if answer is not None and not answer.done():
                    answer.set_result(body.found)
            case _ if self._state is State.CLOSING:
                pass  # whatever was on its way when this side closed
            case MessageHead():
                self._receive_message(body, payload)
            case PutBegin():
                self._answer(self._placer.begin(body))
            case PutData():
                cost = self._charge(sum(map(len, payload)))
                done = self._placer.data(body, payload)
                self._consumed(cost)
                self._answer(done)
            case RegionAsk():
                self._try_post(RegionAnswer(body.ask_id, self._placer.knows(body.region_id, body.nbytes)))
            case _:
                raise FrameError(f"{type(body).__name__} on an open channel")

    def _receive_message(self, head: MessageHead, payload: list[memoryview]) -> None:
        if len(payload) != 1 + head.num_buffers:
            raise FrameError(f"message of {head.num_buffers} buffers came in {len(payload)} frames")
        nbytes = sum(map(len, payload))
        if nbytes > self._max_message_bytes:
            raise FrameError(f"message of {nbytes} bytes exceeds {self._max_message_bytes}")
        cost = self._charge(nbytes)
        self._inbox.push(_Received(bytes(payload[0]), tuple(payload[1:]), cost))

    def _charge(self, nbytes: int) -> int:
        cost = self._grants.charge(nbytes)
        if cost is None:
            raise FrameError("more bytes sent than were granted")
        return cost

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

    def _answer(self, done: PutDone | None) -> None:
        if done is not None:
            self._try_post(done)

    def _closing_confirmed(self) -> None:
        if self._closed is not None and not self._closed.done():
            self._closed.set_result(None)

    # Frames out

    def _post(self, body: Body, payload: Sequence[Part] = ()) -> list[zmq.MessageTracker]:
        """
        Raises:
            ChannelClosed: the connection is lost; the channel has ended.
        """
        try:
            trackers = self._link.send(encode(self.channel_id, self._grants.take(), body), payload)
        except LinkLost as error:
            self._end("the connection to the peer is lost", notify=False)
            raise ChannelClosed(self._reason) from error
        self._liveness.sent(self._loop.time())
        return trackers

    def _try_post(self, body: Body) -> None:
        if self._state is not State.ENDED:
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
        if self._put is not None and not self._put.outcome.done():
            self._put.outcome.set_result(None)
        for answer in self._asks.values():
            if not answer.done():
                answer.set_result(None)

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
