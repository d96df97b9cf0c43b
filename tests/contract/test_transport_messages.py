"""Messages: whole, once, in order, into the memory that the receiver provides."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from transport_world import SMALL_LIMIT, World

from transport.base import Channel


async def test_messages_arrive_whole_once_and_in_order(world: World) -> None:
    near, far = await world.pair()
    sizes = [0, 1, 100, 65_535, 65_536, 3_000_000]
    wanted = [(f"{number}".encode(), [bytes([number % 256]) * size for size in sizes[: number % 7]]) for number in range(60)]

    async def send(channel: Channel) -> None:
        for header, buffers in wanted:
            await channel.send(header, buffers)

    async def receive(channel: Channel) -> None:
        for header, buffers in wanted:
            message = await channel.recv()
            assert message.header == header
            assert [bytes(buffer) for buffer in message.buffers] == buffers

    await asyncio.wait_for(asyncio.gather(send(near), send(far), receive(near), receive(far)), 20)


async def test_the_receiver_provides_the_memory(world: World) -> None:
    near, far = await world.pair()
    pool = memoryview(bytearray(3_000_010))
    asked: list[tuple[int, ...]] = []

    def allocate(sizes: tuple[int, ...]) -> list[memoryview]:
        asked.append(sizes)
        starts = itertools.accumulate(sizes, initial=0)
        return [pool[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    await near.send(b"h", [b"a" * 10, b"b" * 3_000_000])
    message = await far.recv(allocate)

    assert asked == [(10, 3_000_000)]
    assert bytes(pool) == b"a" * 10 + b"b" * 3_000_000
    assert [len(buffer) for buffer in message.buffers] == [10, 3_000_000]


@pytest.mark.parametrize(
    "wrong", [[], [memoryview(bytearray(3))], [memoryview(bytes(4))]], ids=["missing", "too small", "read-only"]
)
async def test_wrong_memory_is_refused_and_the_message_stays(world: World, wrong: list[memoryview]) -> None:
    near, far = await world.pair()
    await near.send(b"h", [b"data"])
    with pytest.raises(ValueError, match="allocate"):
        await far.recv(lambda _: wrong)
    message = await far.recv()
    assert bytes(message.buffers[0]) == b"data"


async def test_source_buffers_may_be_reused_after_send(world: World) -> None:
    near, far = await world.pair()
    source = bytearray(b"1" * 200_000)
    await near.send(b"first", [source])
    source[:] = b"2" * 200_000
    await near.send(b"second", [source])
    assert bytes((await far.recv()).buffers[0]) == b"1" * 200_000
    assert bytes((await far.recv()).buffers[0]) == b"2" * 200_000


async def test_a_message_beyond_the_limit_is_refused_and_the_channel_lives(narrow: World) -> None:
    near, far = await narrow.pair()
    with pytest.raises(ValueError, match="max_message_bytes"):
        await near.send(b"h", [bytes(SMALL_LIMIT)])
    with pytest.raises(ValueError, match="contiguous"):
        await near.send(b"h", [memoryview(bytes(10))[::2]])
    await near.send(b"h", [bytes(SMALL_LIMIT - 1)])
    assert len((await far.recv()).buffers[0]) == SMALL_LIMIT - 1


async def test_one_reader_at_a_time(world: World) -> None:
    near, far = await world.pair()
    reading = asyncio.create_task(near.recv())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="another task"):
        await near.recv()
    await far.send(b"one")
    assert (await asyncio.wait_for(reading, 2)).header == b"one"


async def test_sends_of_several_tasks_go_in_the_order_of_their_calls(narrow: World) -> None:
    near, far = await narrow.pair()
    # 1. Far more than may be on its way, so that most of them wait.
    sending = [asyncio.create_task(near.send(str(n).encode(), [bytes(n * 300)])) for n in range(150)]
    await asyncio.sleep(0.02)
    assert not all(task.done() for task in sending)
    # 2. They arrive whole and in order.
    for number in range(150):
        message = await asyncio.wait_for(far.recv(), 5)
        assert (message.header, len(message.buffers[0])) == (str(number).encode(), number * 300)
    await asyncio.gather(*sending)
