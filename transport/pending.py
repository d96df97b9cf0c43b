"""Questions to the peer that wait for an answer, by number."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Pending(Generic[T]):
    """None is the answer to all that are open when the channel ends."""

    def __init__(self) -> None:
        self._futures: dict[int, asyncio.Future[T | None]] = {}
        self._last_id = 0
        self._ended = False

    def __len__(self) -> int:
        return len(self._futures)

    @contextmanager
    def ask(self) -> Iterator[tuple[int, asyncio.Future[T | None]]]:
        """A number that was never used, and where its answer comes; forgotten at the end of the block."""
        self._last_id += 1
        number, future = self._last_id, asyncio.get_running_loop().create_future()
        self._futures[number] = future
        if self._ended:
            future.set_result(None)
        try:
            yield number, future
        finally:
            del self._futures[number]

    def answer(self, number: int, value: T) -> None:
        """Answers to nothing are ignored: who asked may have been cancelled."""
        future = self._futures.get(number)
        if future is not None and not future.done():
            future.set_result(value)

    def end(self) -> None:
        self._ended = True
        for future in self._futures.values():
            if not future.done():
                future.set_result(None)
