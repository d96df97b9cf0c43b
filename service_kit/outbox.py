"""Posting messages to a channel from synchronous code, in order."""

from __future__ import annotations

import asyncio

import msgspec

from transport.base import Channel


class Outbox:
    """A queue in front of one channel. `run` sends until cancelled or the channel ends."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._encoder = msgspec.msgpack.Encoder()
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
