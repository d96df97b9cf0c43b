"""What is on its way is bounded, and who comes first is served first."""

from __future__ import annotations

import asyncio
import os

from transport_world import SMALL_LIMIT, World

from transport.base import ByteRange, Write


async def test_a_sender_waits_for_a_slow_receiver(narrow: World) -> None:
    near, far = await narrow.pair()
    total, size, sent = 200, 4000, 0

    async def send() -> None:
        nonlocal sent
        for number in range(total):
            await near.send(str(number).encode(), [bytes(size)])
            sent += 1

    sending = asyncio.create_task(send())
    # 1. Nobody receives: what is on its way stays within the limit.
    await asyncio.sleep(0.2)
    assert 0 < sent * size <= SMALL_LIMIT
    # 2. A slow receiver: the sender is never more than the limit ahead.
    for number in range(total):
        message = await asyncio.wait_for(far.recv(), 5)
        assert message.header == str(number).encode()
        assert (sent - number) * size <= SMALL_LIMIT + 2 * size
    await sending


async def test_empty_messages_are_bounded_too(narrow: World) -> None:
    near, far = await narrow.pair()
    sent = 0

    async def send() -> None:
        nonlocal sent
        for _ in range(2000):
            await near.send(b"")
            sent += 1

    sending = asyncio.create_task(send())
    await asyncio.sleep(0.1)
    assert sent < 2000
    for _ in range(2000):
        await asyncio.wait_for(far.recv(), 5)
    await sending


async def test_puts_larger_than_what_may_be_on_its_way(narrow: World) -> None:
    near, _ = await narrow.pair()
    region = narrow.far.create_region(1 << 20)
    region.open_window(5, [ByteRange(0, 1 << 20)])
    remote = await near.open_region(region.descriptor())
    source = os.urandom(1 << 20)
    await asyncio.wait_for(remote.put(5, [Write(0, source)]), 10)
    assert bytes(region.memory) == source
