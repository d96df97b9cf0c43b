"""What the contract suite runs on: pairs of channels of one kind of transport, and what may be left afterwards (nothing)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
import zmq

from transport.base import ByteRange, Channel, Listener, Transport, Write
from transport.errors import ChannelClosed
from transport.inproc_hub import InprocHub
from transport.options import TransportOptions
from transport.registry import create_transport
from transport.ucx import is_installed as ucx_is_installed

SMALL_LIMIT = 64 << 10
KINDS = (
    "inproc",
    "zmq-tcp",
    "zmq-ipc",
    "shm",
    pytest.param("ucx", marks=pytest.mark.skipif(not ucx_is_installed(), reason="ucxx is not installed (extra: ucx)")),
)
PEER = Path(__file__).with_name("transport_peer.py")


def shm_entries() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"kvrelay-{os.getpid()}-")}


def warm_up_pyzmq() -> None:
    """pyzmq starts one thread per process, with sockets of its own, at the first zero-copy send."""
    context = zmq.Context()
    left, right = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    left.bind("inproc://warm-up")
    right.connect("inproc://warm-up")
    left.send(bytes(1 << 20), copy=False)
    right.recv()
    context.destroy(linger=0)


async def warm_up_ucx() -> None:
    """UCX starts threads and opens descriptors of the whole process with the first lane."""
    transport = create_transport("ucx", TransportOptions())
    far = create_transport("ucx", TransportOptions())
    over = asyncio.Event()

    async def keep(channel: Channel) -> None:
        await over.wait()

    listener = await far.listen("ucx://127.0.0.1:0", keep)
    channel = await transport.connect(listener.address, soon(10))
    region = far.create_region(4096)
    region.open_window(1, [ByteRange(0, 4096)])
    await (await channel.open_region(region.descriptor())).put(1, [Write(0, b"x")])
    over.set()
    await transport.close()
    await far.close()


class World:
    """Two transports that can reach each other."""

    def __init__(self, kind: str, folder: Path, **limits: object) -> None:
        self.kind = kind
        self.scheme = kind.split("-")[0]
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []
        self._limits = {"liveness_s": 0.6, **limits}
        self._hub = InprocHub()
        self._transports: list[Transport] = []
        self._addresses = 0
        self._over = asyncio.Event()
        self.near = self.transport()
        self.far = self.transport()

    def transport(self, **limits: object) -> Transport:
        options = TransportOptions(inproc_hub=self._hub, **{**self._limits, **limits})  # type: ignore[arg-type]
        self._transports.append(create_transport(self.scheme, options))
        return self._transports[-1]

    def address(self) -> str:
        """A fresh one."""
        self._addresses += 1
        match self.kind:
            case "inproc":
                return f"inproc://contract-{self._addresses}"
            case "ucx":
                return "ucx://127.0.0.1:0"
            case "zmq-tcp":
                return "tcp://127.0.0.1:0"
            case _:
                return f"ipc://{self.folder}/{self._addresses}.sock"

    async def pair(self, near: Transport | None = None, far: Transport | None = None) -> tuple[Channel, Channel]:
        """(dialed by `near`, accepted by `far`)"""
        accepted: asyncio.Queue[Channel] = asyncio.Queue()

        async def keep(channel: Channel) -> None:
            await accepted.put(channel)
            await self._over.wait()

        listener = await (far or self.far).listen(self.address(), keep)
        dialed = await (near or self.near).connect(listener.address, soon(5))
        return dialed, await asyncio.wait_for(accepted.get(), 5)

    async def listener(self, transport: Transport | None = None) -> tuple[Listener, asyncio.Queue[Channel]]:
        accepted: asyncio.Queue[Channel] = asyncio.Queue()

        async def keep(channel: Channel) -> None:
            await accepted.put(channel)
            await self._over.wait()

        return await (transport or self.far).listen(self.address(), keep), accepted

    def spawn(self, role: str, address: str, liveness_s: float) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(PEER), role, self.scheme, address, str(liveness_s)], stdout=subprocess.PIPE, text=True
        )
        self.processes.append(process)
        return process

    async def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._over.set()  # ends the handlers, which are otherwise cancelled after liveness_s
        for transport in self._transports:
            await transport.close()


class LeakCheck:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = psutil.Process()
        self._fds = self._process.num_fds()
        self._threads = self._native_threads()

    async def nothing_is_left(self) -> None:
        await eventually(lambda: self._process.num_fds() <= self._fds, "file descriptors")
        await eventually(lambda: self._native_threads() <= self._threads, "threads")
        assert shm_entries() == set()
        assert [path.name for path in self._folder.iterdir()] == []
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        assert not [task for task in tasks if "channel from" in task.get_name()]

    def _native_threads(self) -> int:
        """The loop's own worker threads end with the loop, after the test."""
        workers = [thread for thread in threading.enumerate() if thread.name.startswith("asyncio_")]
        return self._process.num_threads() - len(workers)


async def make_world(kind: str, folder: Path, **limits: object) -> AsyncIterator[World]:
    leaks = LeakCheck(folder)
    world = World(kind, folder, **limits)
    try:
        yield world
    finally:
        await world.close()
    await leaks.nothing_is_left()


async def ended(channel: Channel, within_s: float = 2.0) -> None:
    """Receiving, sending and opening a region raise ChannelClosed."""
    with pytest.raises(ChannelClosed):
        await asyncio.wait_for(channel.recv(), within_s)
    with pytest.raises(ChannelClosed):
        await channel.send(b"too late")
    with pytest.raises(ChannelClosed):
        await channel.open_region(b"")


async def fill(channel: Channel) -> None:
    """Sends until the channel ends or the task is cancelled."""
    while True:
        await channel.send(b"x", [bytes(10_000)])


def soon(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def eventually(condition: Callable[[], bool], what: str, within_s: float = 3.0) -> None:
    end = soon(within_s)
    while not condition():
        assert asyncio.get_running_loop().time() < end, f"left over or never came: {what}"
        await asyncio.sleep(0.005)
