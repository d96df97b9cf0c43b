"""Every await may be cancelled."""

from __future__ import annotations

import asyncio

import pytest
from transport_world import SMALL_LIMIT, World, ended, fill, soon

from transport.base import ByteRange, Channel, Write
from transport.errors import ChannelClosed


async def test_a_cancelled_recv_loses_nothing(world: World) -> None:
    near, far = await world.pair()

    async def send() -> None:
        for number in range(100):
            await near.send(str(number).encode(), [bytes(3 << 20 if number % 20 == 0 else 10)])
            await asyncio.sleep(0.0005)

    sending = asyncio.create_task(send())
    received: list[int] = []

    async def receive() -> None:
        message = await far.recv(lambda sizes: [memoryview(bytearray(size)) for size in sizes])
        received.append(int(message.header))

    for attempt in range(2000):
        task = asyncio.create_task(receive())
        for _ in range(attempt % 4):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if len(received) == 100:
            break
        if attempt % 50 == 0:
            await asyncio.sleep(0.005)
    while len(received) < 100:
        await asyncio.wait_for(receive(), 5)
    assert received == list(range(100))
    await sending


async def test_a_cancelled_send_aborts_the_channel(narrow: World) -> None:
    near, far = await narrow.pair()
    sending = asyncio.create_task(fill(near))
    await asyncio.sleep(0.05)
    assert not sending.done()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    await ended(near)
    while True:  # what arrived before may still be read
        try:
            await asyncio.wait_for(far.recv(), 2)
        except ChannelClosed:
            break
    await ended(far)


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
async def test_a_cancelled_put_aborts_the_channel_and_writes_no_more(world: World, turns: int) -> None:
    near, far = await world.pair()
    region = world.far.create_region(48 << 20)
    region.open_window(1, [ByteRange(0, 48 << 20)])
    remote = await near.open_region(region.descriptor())
    putting = asyncio.create_task(remote.put(1, [Write(0, b"x" * (48 << 20))]))
    await asyncio.sleep(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    assert not putting.done()
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    await ended(near)
    await ended(far)
    # The owner has heard that the channel ended: from here on the memory is its own again.
    region.close_window(1)
    before = bytes(region.memory)
    await asyncio.sleep(0.05)
    assert bytes(region.memory) == before


async def test_a_send_that_is_cancelled_before_its_turn_has_not_happened(narrow: World) -> None:
    near, far = await narrow.pair()
    sending = [asyncio.create_task(near.send(bytes([n]), [bytes(SMALL_LIMIT - 100)])) for n in range(5)]
    await asyncio.sleep(0)
    assert not sending[3].done()
    sending[3].cancel()
    for number in (0, 1, 2, 4):
        assert (await asyncio.wait_for(far.recv(), 5)).header == bytes([number])
    outcomes = await asyncio.gather(*sending, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes].count(asyncio.CancelledError) == 1


async def test_a_put_that_is_cancelled_behind_another_has_not_happened_or_ends_the_channel(narrow: World) -> None:
    """Not happened, where it was still waiting for its turn; the transport says how long that is."""
    near, far = await narrow.pair()
    region = narrow.far.create_region(8 << 20)
    region.open_window(1, [ByteRange(0, 8 << 20)])
    remote = await near.open_region(region.descriptor())
    putting = [asyncio.create_task(remote.put(1, [Write(0, bytes([n]) * (8 << 20))])) for n in (1, 2)]
    while not region.memory[0]:
        await asyncio.sleep(0)
    assert not putting[1].done()
    putting[1].cancel()
    first, second = await asyncio.wait_for(asyncio.gather(*putting, return_exceptions=True), 5)
    assert isinstance(second, asyncio.CancelledError)
    if first is None:
        await near.send(b"after")
        assert (await asyncio.wait_for(far.recv(), 5)).header == b"after"
        assert set(region.memory[::4096]) == {1}
    else:
        assert isinstance(first, ChannelClosed)
        await ended(near)
        await ended(far)


async def test_a_cancelled_connect_leaves_nothing(world: World) -> None:
    listener, accepted = await world.listener()
    address = listener.address
    for turns in range(12):
        connecting = asyncio.create_task(world.near.connect(address, soon(5)))
        for _ in range(turns):
            await asyncio.sleep(0.0005)
        connecting.cancel()
        outcome = (await asyncio.gather(connecting, return_exceptions=True))[0]
        if isinstance(outcome, Channel):
            outcome.abort()
    while not accepted.empty():
        await ended(accepted.get_nowait())
    assert isinstance(await world.near.connect(address, soon(5)), Channel)


async def test_a_cancelled_close_aborts(world: World) -> None:
    near, far = await world.pair()
    closing = asyncio.create_task(near.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    await ended(near)
    await ended(far)
