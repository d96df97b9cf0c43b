"""The receiving end of a channel's UCX lane: checks a put, posts its pieces into the region, and fences.

A piece that was posted belongs to UCX until it has come. When a window closes over posted pieces, the lane is closed with
them: from then on nothing of it is received. Puts of other windows that were under way are tried again on a new lane.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transport.base import ByteRange
from transport.errors import PlacementRefused, TransportError
from transport.regions import LocalRegion
from transport.ucx import Lane, UcxContext
from transport.ucx_frames import Done, Grant, Open, Opened, Outcome, Put, encode_aside
from transport.ucx_writer import tag_of
from transport.windows import Window
from transport.zmq_channel import ZmqChannel
from transport.zmq_frames import FrameError


@dataclass(slots=True, eq=False)
class _Taking:
    """A put that was admitted."""

    put_id: int
    region: LocalRegion
    window: Window
    pieces: tuple[ByteRange, ...]
    num_posted: int = 0
    num_received: int = 0


class UcxOwner:
    """One per channel."""

    def __init__(self, channel: ZmqChannel, context: UcxContext, find_region: Callable[[bytes], LocalRegion | None]) -> None:
        self._channel = channel
        self._context = context
        self._find_region = find_region
        self._lane: Lane | None = None
        self._lane_number = 0
        self._taking: dict[int, _Taking] = {}  # in the order in which they came
        self._last_put_id = 0
        self._posted_bytes = 0

    def open(self, wanted: Open) -> None:
        """A new lane; the former one, which the writer has given up, is closed."""
        self._close_lane("the writer opened another lane")
        self._lane_number = wanted.lane
        version = self._context.version
        try:
            if self._find_region(wanted.region_id) is None:
                raise TransportError("no such region")
            if wanted.version != version:
                raise TransportError(f"UCX {version} there, {wanted.version} here")
            self._lane = Lane(self._context, self._broken)
            self._lane.connect(wanted.address)
            answer = Opened(wanted.lane, version, self._lane.address)
        except TransportError as error:
            self._close_lane(str(error))
            answer = Opened(wanted.lane, version, b"", str(error))
        self._channel.tell_aside(encode_aside(answer))

    def put(self, put: Put) -> None:
        """
        Raises:
            FrameError: puts run backwards.
        """
        if put.put_id <= self._last_put_id:
            raise FrameError(f"put {put.put_id} out of turn")
        self._last_put_id = put.put_id
        if self._lane is None or put.lane != self._lane_number:
            self._say(Done(put.put_id, Outcome.AGAIN))  # the lane was closed while this was on its way
            return
        region = self._find_region(put.region_id)
        if region is None:
            self._say(Done(put.put_id, Outcome.REFUSED, "no such region"))
            return
        try:
            window = region.admit(put.key, put.pieces)
        except PlacementRefused as refusal:
            self._say(Done(put.put_id, Outcome.REFUSED, str(refusal)))
            return
        self._taking[put.put_id] = _Taking(put.put_id, region, window, put.pieces)
        if self._window_closed not in window.watchers:
            window.watchers.append(self._window_closed)
        self._post()

    def end(self) -> None:
        """The channel's fence: nothing is received any more."""
        for taking in self._taking.values():
            self._forget_watch(taking)
        self._taking.clear()
        if self._lane is not None:
            self._lane.close()
            self._lane = None

    def _post(self) -> None:
        """Lends memory to UCX, first come, first served, as much as may be on its way."""
        assert self._lane is not None
        limit = self._channel.max_in_flight_bytes
        for taking in list(self._taking.values()):
            first = taking.num_posted
            for piece in taking.pieces[first:]:
                if self._posted_bytes and self._posted_bytes + piece.nbytes > limit:
                    break
                self._posted_bytes += piece.nbytes
                target = taking.region.memory[piece.offset : piece.offset + piece.nbytes]
                self._lane.receive(tag_of(taking.put_id, taking.num_posted), target, self._receiver(taking, piece.nbytes))
                taking.num_posted += 1
            if taking.num_posted > first:
                self._say(Grant(taking.put_id, taking.num_posted - first))
            if taking.num_posted < len(taking.pieces):
                return

    def _receiver(self, taking: _Taking, nbytes: int) -> Callable[[str | None], None]:
        def received(error: str | None) -> None:
            self._posted_bytes -= nbytes
            if error is not None:
                return  # the lane is broken
            taking.num_received += 1
            if taking.num_received == len(taking.pieces):
                self._over(taking, Done(taking.put_id, Outcome.PLACED))
            if self._lane is not None:
                self._post()

        return received

    def _window_closed(self) -> None:
        closed = [taking for taking in self._taking.values() if not taking.window.is_open]
        cut = any(taking.num_received < taking.num_posted for taking in closed)
        for taking in closed:
            self._over(taking, Done(taking.put_id, Outcome.REFUSED, "the window was closed during the put"))
        if cut:
            self._close_lane("a window was closed")

    def _close_lane(self, why: str) -> None:
        if self._lane is not None:
            self._lane.close()
            self._lane = None
            self._posted_bytes = 0
        for taking in list(self._taking.values()):
            self._over(taking, Done(taking.put_id, Outcome.AGAIN, why))

    def _over(self, taking: _Taking, done: Done) -> None:
        del self._taking[taking.put_id]
        self._forget_watch(taking)
        self._say(done)

    def _forget_watch(self, taking: _Taking) -> None:
        others = (other for other in self._taking.values() if other is not taking)
        watched = self._window_closed in taking.window.watchers
        if watched and not any(other.window is taking.window for other in others):
            taking.window.watchers.remove(self._window_closed)

    def _broken(self, reason: str) -> None:
        """The writer may have closed the lane because it ends; otherwise the channel has no use."""
        lane = self._lane
        self._channel.fail_later(f"UCX: {reason}", lambda: lane is not None and self._lane is lane)

    def _say(self, aside: Done | Grant) -> None:
        self._channel.tell_aside(encode_aside(aside))
