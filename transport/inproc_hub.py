"""Where the transports of one process find each other by name."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from transport.errors import AddressError

T = TypeVar("T")


class NameTable(Generic[T]):
    """Names and who answers to them; lookups wait for a name to appear. For one event loop."""

    def __init__(self) -> None:
        self._entries: dict[str, T] = {}
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, name: str, entry: T) -> None:
        """
        Raises:
            AddressError: the name is in use.
        """
        if name in self._entries:
            raise AddressError(f"inproc://{name} is in use")
        self._entries[name] = entry
        for waiter in self._waiters.pop(name, []):
            if not waiter.done():
                waiter.set_result(None)

    def remove(self, name: str, entry: T) -> None:
        if self._entries.get(name) is entry:
            del self._entries[name]

    async def find(self, name: str, deadline: float) -> T | None:
        """The entry of `name`, waiting for it until `deadline`; None when nobody took the name."""
        loop = asyncio.get_running_loop()
        while (entry := self._entries.get(name)) is None:
            if loop.time() >= deadline:
                return None
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.setdefault(name, []).append(waiter)
            try:
                async with asyncio.timeout_at(deadline):
                    await waiter
            except TimeoutError:
                continue
            finally:
                self._forget(name, waiter)
        return entry

    def _forget(self, name: str, waiter: asyncio.Future[None]) -> None:
        waiters = self._waiters.get(name)
        if waiters and waiter in waiters:
            waiters.remove(waiter)
        if waiters == []:
            del self._waiters[name]


class InprocHub:
    """Shared by the inproc transports that are to reach each other; passed to their constructors."""

    def __init__(self) -> None:
        self.listeners: NameTable[object] = NameTable()
