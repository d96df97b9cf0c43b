"""Puts items together from the frames of one connection: a head, and behind it as many bytes of tail as it announced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from transport.flow import GrantAccount
from transport.zmq_frames import FrameError, Head, MessageHead, PutData, decode


@dataclass(frozen=True, slots=True)
class Item:
    head: Head
    tail: tuple[memoryview, ...] = ()
    cost: int = 0  # of its sender's credit


def decode_alone(frames: Sequence[zmq.Frame]) -> Head:
    """The head of an item that has no tail, as those of a handshake.

    Raises:
        FrameError: it is something else.
    """
    if len(frames) != 1:
        raise FrameError(f"a message of {len(frames)} parts")
    return decode(frames[0].buffer)


class Incoming:
    """`begin` what was decoded, then `add` frames while `is_open`; the item is complete when it is returned.

    Args:
        limit: bytes of one channel and direction that may be on their way.
    """

    def __init__(self, grants: GrantAccount, limit: int, max_message_bytes: int) -> None:
        self._grants = grants
        self._limit = limit
        self._max_message_bytes = max_message_bytes
        self._head: Head | None = None
        self._cost = 0
        self._tail: list[memoryview] = []
        self._missing = 0

    @property
    def is_open(self) -> bool:
        return self._head is not None

    def begin(self, head: Head) -> Item | None:
        """
        Raises:
            FrameError: larger than may be, or its sender had no credit for it. Nothing of it is kept.
        """
        body = head.body
        if not isinstance(body, MessageHead | PutData):
            return Item(head)
        nbytes = body.tail_nbytes + len(body.inline)
        if isinstance(body, MessageHead):
            nbytes += len(body.header)
            if nbytes > self._max_message_bytes:
                raise FrameError(f"message of {nbytes} bytes exceeds {self._max_message_bytes}")
        cost = self._grants.charge(nbytes) if nbytes <= self._limit else None
        if cost is None:
            raise FrameError("more bytes sent than were granted")
        if not body.tail_nbytes:
            return Item(head, (), cost)
        self._head, self._cost, self._missing = head, cost, body.tail_nbytes
        return None

    def add(self, frame: memoryview) -> Item | None:
        """
        Raises:
            FrameError: an empty frame, or more than was announced.
        """
        assert self._head is not None
        if not 0 < len(frame) <= self._missing:
            raise FrameError(f"{len(frame)} bytes where {self._missing} are missing")
        self._tail.append(frame)
        self._missing -= len(frame)
        if self._missing:
            return None
        item = Item(self._head, tuple(self._tail), self._cost)
        self._head, self._tail = None, []
        return item


def buffers_of(body: MessageHead, tail: Sequence[memoryview]) -> tuple[memoryview, ...]:
    """A message's buffers.

    Raises:
        FrameError: the tail is not cut where the buffers are.
    """
    if not tail:
        whole, buffers, start = memoryview(body.inline), [], 0
        for size in body.sizes:
            buffers.append(whole[start : start + size])
            start += size
        return tuple(buffers)
    rest = iter(tail)
    taken = tuple(next(rest, memoryview(b"")) if size else memoryview(b"") for size in body.sizes)
    if tuple(len(buffer) for buffer in taken) != body.sizes:
        raise FrameError("a message's frames are not its buffers")
    return taken
