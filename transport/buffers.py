"""Views of bytes and copies between them.

A copy runs on the event loop in slices of `SLICE_BYTES`, so that nothing else waits longer than one slice takes (well under
a millisecond). numpy copies, since it releases the GIL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from transport.base import Allocate, Buffer, ByteRange, Write
from transport.errors import PlacementRefused
from transport.windows import MAX_KEY

SLICE_BYTES = 2 << 20
_NUMPY_FROM_BYTES = 64 << 10  # below, a memoryview assignment is faster than making two arrays


def as_bytes(buffer: Buffer) -> memoryview:
    """A flat view of unsigned bytes.

    Raises:
        ValueError: the buffer is not contiguous.
    """
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("a buffer must be contiguous")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def copy(target: memoryview, source: memoryview) -> None:
    """Both flat and of equal length; at most a slice when called on the event loop."""
    if len(source) < _NUMPY_FROM_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def slices(view: memoryview, nbytes: int) -> Iterator[memoryview]:
    for start in range(0, len(view), nbytes):
        yield view[start : start + nbytes]


async def copy_sliced(target: memoryview, source: memoryview) -> None:
    """Copies of any length, letting the loop run between slices."""
    for start in range(0, len(source), SLICE_BYTES):
        if start:
            await asyncio.sleep(0)
        copy(target[start : start + SLICE_BYTES], source[start : start + SLICE_BYTES])


async def fill_allocated(buffers: Sequence[memoryview], allocate: Allocate) -> tuple[memoryview, ...]:
    """Copies received buffers into the memory that the application provides.

    Raises:
        ValueError: what `allocate` returned does not fit the sizes that it was given.
    """
    sizes = tuple(len(buffer) for buffer in buffers)
    targets = tuple(as_bytes(target) for target in allocate(sizes))
    given = tuple(len(target) for target in targets)
    if given != sizes:
        raise ValueError(f"allocate returned memory of {given} bytes for buffers of {sizes}")
    if any(target.readonly for target in targets):
        raise ValueError("allocate returned memory that cannot be written to")
    for target, source in zip(targets, buffers, strict=True):
        await copy_sliced(target, source)
    return targets


@dataclass(frozen=True, slots=True)
class PutPlan:
    """The writes of one put in order: where they go (adjacent ones joined), and the bytes that fill these ranges."""

    ranges: tuple[ByteRange, ...]
    sources: tuple[tuple[int, memoryview], ...]  # (offset, bytes)
    nbytes: int

    def pieces(self, nbytes: int) -> Iterator[list[memoryview]]:
        """The payload, cut into lists of views of at most `nbytes` together."""
        piece: list[memoryview] = []
        room = nbytes
        for _, source in self.sources:
            while len(source):
                piece.append(source[:room])
                source = source[room:]
                room -= len(piece[-1])
                if room == 0 or len(piece) == _MAX_VIEWS_PER_PIECE:
                    yield piece
                    piece, room = [], nbytes
        if piece:
            yield piece


_MAX_VIEWS_PER_PIECE = 256


def plan_put(key: int, writes: Sequence[Write], region_nbytes: int) -> PutPlan:
    """What the writer can check by itself.

    Raises:
        PlacementRefused: a write lies outside the region, or `key` cannot be a window's.
        ValueError: a source is not contiguous.
    """
    if not 0 <= key <= MAX_KEY:
        raise PlacementRefused("no window is open under this key")
    ranges: list[ByteRange] = []
    sources: list[tuple[int, memoryview]] = []
    total = 0
    for write in writes:
        source = as_bytes(write.source)
        if write.offset < 0 or write.offset + len(source) > region_nbytes:
            raise PlacementRefused(f"{len(source)} bytes at {write.offset} lie outside the region of {region_nbytes} bytes")
        if not len(source):
            continue
        total += len(source)
        sources.append((write.offset, source))
        if ranges and ranges[-1].offset + ranges[-1].nbytes == write.offset:
            ranges[-1] = ByteRange(ranges[-1].offset, ranges[-1].nbytes + len(source))
        else:
            ranges.append(ByteRange(write.offset, len(source)))
    return PutPlan(tuple(ranges), tuple(sources), total)
