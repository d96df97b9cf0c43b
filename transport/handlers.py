"""Runs the application's handler of each accepted channel."""

from __future__ import annotations

import asyncio

from transport.base import Channel, OnChannel
from transport.errors import ChannelClosed


class HandlerTasks:
    """One task per accepted channel; the channel is aborted when its handler returns or raises."""

    def __init__(self, on_channel: OnChannel) -> None:
        self._on_channel = on_channel
        self._tasks: dict[asyncio.Task[None], Channel] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, channel: Channel) -> None:
        task = asyncio.get_running_loop().create_task(self._run(channel), name=f"channel from {channel.peer}")
        self._tasks[task] = channel
        task.add_done_callback(self._ended)

    async def close(self, grace_s: float) -> None:
        """Aborts the channels, which ends well-behaved handlers, and cancels those that still run after `grace_s`."""
        for channel in list(self._tasks.values()):
            channel.abort()
        others = [task for task in self._tasks if task is not asyncio.current_task()]
        if not others:
            return
        try:
            _, pending = await asyncio.wait(others, timeout=grace_s)
        except asyncio.CancelledError:
            for task in others:
                task.cancel()
            raise
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    async def _run(self, channel: Channel) -> None:
        await self._on_channel(channel)

    def _ended(self, task: asyncio.Task[None]) -> None:
        channel = self._tasks.pop(task)
        channel.abort()
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, ChannelClosed):
            task.get_loop().call_exception_handler(
                {"message": f"the handler of a channel from {channel.peer} failed", "exception": error, "task": task}
            )
