"""Posting messages to a channel from synchronous code, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec

from transport.base import Channel
from wire.codec import MessageEncoder


class Outbox:
    """A queue in front of one channel. `run` sends until cancelled or the channel ends."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._encoder = MessageEncoder()
        self._queue: asyncio.Queue[msgspec.Struct] = asyncio.Queue()

    def post(self, message: msgspec.Struct) -> None:
        """Never waits. What is queued when the channel ends is lost, as everything on its way is."""
        self._queue.put_nowait(message)

    async def run(self) -> None:
        """
        Raises:
            ChannelClosed: the channel has ended.
        """
        while True:
            message = await self._queue.get()
            await self._channel.send(self._encoder.encode(message))
            self._queue.task_done()

    async def flush(self) -> None:
        """Wait until everything posted so far has been handed to the channel. Needs `run` to be running."""
        await self._queue.join()


async def run_together(*parts: Coroutine[Any, Any, None]) -> None:
    """Run the parts of one connection until the first ends; the others are cancelled, and its error is raised.

    Not a TaskGroup: Python 3.11's loses a cancellation that comes together with a part's failure.
    """
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
