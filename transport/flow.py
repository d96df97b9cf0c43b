"""Bounded flow on one channel: what may be sent, what has arrived, and whose turn it is."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from transport.errors import ChannelClosed

ITEM_OVERHEAD_BYTES = 256
"""Per item, so that empty messages are bounded too."""


def cost_of(nbytes: int, limit: int) -> int:
    """What an item of `nbytes` takes from a window of `limit`. The largest message takes all of it, and no more."""
    return min(nbytes + ITEM_OVERHEAD_BYTES, limit)


class CreditWindow:
    """Sender's side: bytes on their way are at most `limit`. Tasks take in the order of their calls, the peer gives back."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_flight = 0
        self._ended: str | None = None
        self._waiters: deque[tuple[int, asyncio.Future[bool]]] = deque()  # True: taken, False: the channel ended

    async def take(self, cost: int) -> None:
        """Waits until `cost` fits.

        Raises:
            ChannelClosed: the channel ended before.
        """
        if self._ended is None and not self._waiters and self.in_flight + cost <= self.limit:
            self.in_flight += cost
            return
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters.append((cost, waiter))
        self._serve()
        try:
            taken = await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.result():
                self.in_flight -= cost
            else:
                self._waiters = deque(entry for entry in self._waiters if entry[1] is not waiter)
            self._serve()
            raise
        if not taken:
            raise ChannelClosed(self._ended or "the channel ended")

    def give(self, cost: int) -> bool:
        """False when more comes back than was taken: the peer cannot count."""
        if cost > self.in_flight:
            return False
        self.in_flight -= cost
        self._serve()
        return True

    def end(self, reason: str) -> None:
        if self._ended is None:
            self._ended = reason
        self._serve()

    def _serve(self) -> None:
        while self._waiters and (self._ended is not None or self.in_flight + self._waiters[0][0] <= self.limit):
            cost, waiter = self._waiters.popleft()
            if waiter.done():
                continue  # cancelled in this very turn of the loop
            if self._ended is None:
                self.in_flight += cost
            waiter.set_result(self._ended is None)


class GrantAccount:
    """Receiver's side of the credit: what arrived, was consumed, and may be granted again."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0  # arrived and not granted again
        self._grantable = 0  # the part of it that was consumed

    def charge(self, nbytes: int) -> int | None:
        """The cost of an item that arrived; None when the sender had no credit for it."""
        cost = cost_of(nbytes, self._limit)
        if self._held + cost > self._limit:
            return None
        self._held += cost
        return cost

    def consumed(self, cost: int) -> None:
        self._grantable += cost

    @property
    def pending(self) -> bool:
        return self._grantable > 0

    @property
    def urgent(self) -> bool:
        """So much has gathered that the sender may be waiting for it."""
        return self._grantable >= self._limit // 8

    def take(self) -> int:
        granted, self._grantable = self._grantable, 0
        self._held -= granted
        return granted


class HasCost(Protocol):
    @property
    def cost(self) -> int: ...


T = TypeVar("T", bound=HasCost)


class Inbox(Generic[T]):
    """Receiver's side: what arrived, in order. An item stays until `remove`, so a cancelled reader loses nothing."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._ended: str | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def push(self, item: T) -> None:
        if self._ended is None:
            self._items.append(item)
            self._wake()

    async def first(self) -> T:
        """
        Raises:
            ChannelClosed: nothing is left and nothing will come.
        """
        while not self._items:
            if self._ended is not None:
                raise ChannelClosed(self._ended)
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._items[0]

    def remove(self, item: T) -> None:
        """Takes the first item out, after it was used.

        Raises:
            ChannelClosed: it was discarded meanwhile.
        """
        if not self._items or self._items[0] is not item:
            raise ChannelClosed(self._ended or "the channel ended")
        self._items.popleft()

    def finish(self, reason: str) -> None:
        """Nothing more comes; what is here may still be read."""
        if self._ended is None:
            self._ended = reason
        self._wake()

    def discard(self, reason: str) -> None:
        self._items.clear()
        self.finish(reason)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Turn:
    """One task at a time; a second one is a mistake of the caller and hears so, instead of taking another's message."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._taken = False

    def __enter__(self) -> None:
        if self._taken:
            raise RuntimeError(f"another task is {self._doing} on this channel")
        self._taken = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._taken = False
