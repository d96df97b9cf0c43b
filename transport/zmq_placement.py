"""Puts on a ZeroMQ channel, seen by the side that owns the region. No socket, no waiting: frames in, answers out.

    writer   PUT_BEGIN (key, all ranges) | PUT_DATA, PUT_DATA, … | PUT_BEGIN …        (without waiting for an answer)
    owner    checks every range, then copies piece by piece; PUT_DONE at the end, or at once with a refusal

Data of a refused put is on its way already and is dropped as it comes. Puts follow each other and do not mix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from transport.base import ByteRange
from transport.buffers import copy
from transport.errors import PlacementRefused
from transport.regions import LocalRegion
from transport.windows import Window
from transport.zmq_frames import INLINE_BYTES, FrameError, PutBegin, PutData, PutDone

MAX_PUT_RANGES = 1 << 18

FindRegion = Callable[[bytes], LocalRegion | None]


class _Filling:
    """A put that was admitted: the next byte goes to `ranges[index]` at `used`."""

    def __init__(self, put_id: int, region: LocalRegion, window: Window, ranges: tuple[ByteRange, ...]) -> None:
        self.put_id = put_id
        self.window = window
        self.missing = sum(r.nbytes for r in ranges)
        self._region = region
        self._ranges = ranges
        self._index = 0
        self._used = 0

    def fill(self, source: memoryview) -> None:
        self.missing -= len(source)
        while len(source):
            place = self._ranges[self._index]
            part = source[: place.nbytes - self._used]
            start = place.offset + self._used
            copy(self._region.memory[start : start + len(part)], part)
            source = source[len(part) :]
            self._used += len(part)
            if self._used == place.nbytes:
                self._index += 1
                self._used = 0


class Placer:
    """Incoming puts of one channel, which come one after the other."""

    def __init__(self, find_region: FindRegion) -> None:
        self._find_region = find_region
        self._filling: _Filling | None = None
        self._refused_id = 0
        self._last_id = 0

    def knows(self, region_id: bytes, nbytes: int) -> bool:
        region = self._find_region(region_id)
        return region is not None and region.name.nbytes == nbytes

    def begin(self, put: PutBegin) -> PutDone | None:
        """
        Raises:
            FrameError: puts overlap or run backwards.
        """
        if self._filling is not None or put.put_id <= self._last_id:
            raise FrameError(f"put {put.put_id} out of turn")
        self._last_id = put.put_id
        region = self._find_region(put.region_id)
        if region is None:
            return self._refuse(put.put_id, "no such region")
        try:
            window = region.admit(put.key, put.ranges)
        except PlacementRefused as refusal:
            return self._refuse(put.put_id, str(refusal))
        self._filling = _Filling(put.put_id, region, window, put.ranges)
        return None

    def data(self, put: PutData, payload: Sequence[memoryview]) -> PutDone | None:
        """
        Raises:
            FrameError: data of a put that did not begin, or more than it announced.
        """
        if put.put_id == self._refused_id:
            return None
        filling = self._filling
        if filling is None or filling.put_id != put.put_id:
            raise FrameError(f"data of put {put.put_id}, which did not begin")
        if not filling.window.is_open:
            self._filling = None
            return self._refuse(put.put_id, "the window was closed during the put")
        if sum(len(view) for view in payload) > filling.missing:
            raise FrameError(f"put {put.put_id} brings more bytes than it announced")
        for view in payload:
            filling.fill(view)
        if filling.missing:
            return None
        self._filling = None
        return PutDone(put.put_id, None)

    def _refuse(self, put_id: int, reason: str) -> PutDone:
        self._refused_id = put_id
        return PutDone(put_id, reason)


def put_frames(put_id: int, piece: Sequence[memoryview]) -> tuple[PutData, list[bytes | memoryview]]:
    """The head and tail that carry a piece. Small views are gathered: a frame costs more than copying them."""
    nbytes = sum(map(len, piece))
    if nbytes <= INLINE_BYTES:
        return PutData(put_id, 0, b"".join(piece)), []
    tail: list[bytes | memoryview] = []
    for is_small, run in groupby(piece, lambda view: len(view) < INLINE_BYTES):
        views = list(run)
        if is_small:
            tail.append(b"".join(views))
        else:
            tail.extend(views)
    return PutData(put_id, nbytes), tail
