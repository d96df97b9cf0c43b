"""Processes that die or stop."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from transport_world import World, eventually, fill, soon

from transport.base import ByteRange, Write
from transport.errors import ChannelClosed


@pytest.mark.parametrize(
    ("role", "how"), [("dial", signal.SIGKILL), ("listen", signal.SIGKILL), ("dial", signal.SIGSTOP)], ids=str
)
async def test_a_dead_or_silent_peer_is_noticed(apart: World, role: str, how: signal.Signals) -> None:
    liveness_s = 0.4
    # 1. A child connects, or is connected to, and offers a region.
    if role == "dial":
        listener, accepted = await apart.listener()
        child = apart.spawn("dial", listener.address, liveness_s)
        channel = await asyncio.wait_for(accepted.get(), 10)
    else:
        child = apart.spawn("listen", apart.address(), liveness_s)
        assert child.stdout is not None
        address = (await asyncio.to_thread(child.stdout.readline)).strip()
        channel = await apart.near.connect(address, soon(10))
    remote = await channel.open_region((await channel.recv()).header)
    await remote.put(77, [Write(0, b"x" * 1000)])
    segments = {name for name in os.listdir("/dev/shm") if name.startswith(f"kvrelay-{child.pid}-")}
    assert bool(segments) == (apart.scheme == "shm")

    # 2. It stays connected while nothing is said.
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(channel.recv(), liveness_s * 2)

    # 3. It dies, or stops.
    child.send_signal(how)
    start = soon(0)
    with pytest.raises(ChannelClosed):
        await asyncio.wait_for(channel.recv(), liveness_s + 2)
    assert soon(0) - start < liveness_s + 1
    with pytest.raises(ChannelClosed):
        await remote.put(77, [Write(0, b"x")])

    # 4. What it left is reclaimed by the next region, once it is dead.
    child.kill()
    child.wait()
    apart.near.create_region(4096).close()
    assert not segments & set(os.listdir("/dev/shm"))
    stale = list(apart.folder.iterdir()) if role == "listen" else []
    assert bool(stale) == (role == "listen" and apart.kind in ("zmq-ipc", "shm"))
    for left in stale:
        await (await apart.far.listen(f"ipc://{left}", fill)).close()  # a stale socket file is taken over


async def test_a_writer_that_is_killed_writes_no_more(apart: World) -> None:
    listener, accepted = await apart.listener()
    child = apart.spawn("put", listener.address, 0.6)
    channel = await asyncio.wait_for(accepted.get(), 10)
    region = apart.far.create_region(1 << 20)
    region.open_window(77, [ByteRange(0, 1 << 20)])
    await channel.send(region.descriptor())
    assert (await channel.recv()).header == b"writing"
    await eventually(lambda: region.memory[-1] == 0x5A, "the first put")
    child.kill()
    with pytest.raises(ChannelClosed):
        await asyncio.wait_for(channel.recv(), 2)
    region.close_window(77)
    region.memory[:] = bytes(1 << 20)
    await asyncio.sleep(0.05)
    assert not any(region.memory)
