"""Puts: into open windows, whole, in place before the next message."""

from __future__ import annotations

import asyncio

import pytest
from transport_world import World

from transport.base import ByteRange, Write
from transport.errors import PlacementRefused


@pytest.mark.parametrize("writer", ["dialer", "acceptor"])
async def test_put_places_bytes_before_the_next_message(world: World, writer: str) -> None:
    near, far = await world.pair()
    source_end, owner_end, owner = (near, far, world.far) if writer == "dialer" else (far, near, world.near)
    region = owner.create_region(6 << 20)
    region.open_window(5, [ByteRange(0, 1 << 20), ByteRange(1 << 20, 4 << 20)])
    remote = await source_end.open_region(region.descriptor())
    assert remote.nbytes == 6 << 20

    for round_ in range(1, 6):
        source = bytearray(bytes([round_]) * (5 << 20))
        await remote.put(5, [Write(0, memoryview(source)[: 3 << 20]), Write(3 << 20, memoryview(source)[3 << 20 :])])
        source[:] = bytes(5 << 20)  # may be reused
        await source_end.send(b"placed")
        await owner_end.recv()
        assert bytes(region.memory) == bytes([round_]) * (5 << 20) + bytes(1 << 20)


async def test_scattered_writes(world: World) -> None:
    near, _ = await world.pair()
    region = world.far.create_region(1 << 20)
    region.open_window(1, [ByteRange(n * 2000, 1000) for n in range(500)])
    remote = await near.open_region(region.descriptor())
    await remote.put(1, [Write(n * 2000, bytes([n % 251 + 1]) * 1000) for n in range(500)])
    wanted = bytearray(1 << 20)
    for n in range(500):
        wanted[n * 2000 : n * 2000 + 1000] = bytes([n % 251 + 1]) * 1000
    assert bytes(region.memory) == bytes(wanted)
    await remote.put(1, [])
    await remote.put(1, [Write(0, b"")])


REFUSED = {
    "unknown key": (9, [Write(0, b"x")]),
    "before the window": (5, [Write(4095, b"xx")]),
    "behind the window": (5, [Write(8191, b"xx")]),
    "between two ranges": (5, [Write(8000, bytes(5000))]),
    "second write bad": (5, [Write(4096, b"x" * 100), Write(0, b"x")]),
    "outside the region": (5, [Write(65536, b"x")]),
    "across the region's end": (5, [Write(65535, b"xx")]),
    "negative offset": (5, [Write(-1, b"x")]),
    "closed window": (6, [Write(20000, b"x")]),
    "key beyond 64 bits": (2**64 + 5, [Write(4096, b"x")]),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_write_outside_its_window_writes_nothing(world: World, case: str) -> None:
    near, far = await world.pair()
    region = world.far.create_region(65536)
    region.open_window(5, [ByteRange(4096, 4096), ByteRange(12288, 4096)])
    region.open_window(6, [ByteRange(20000, 1000)])
    region.close_window(6)
    remote = await near.open_region(region.descriptor())
    key, writes = REFUSED[case]

    with pytest.raises(PlacementRefused):
        await remote.put(key, writes)
    assert bytes(region.memory) == bytes(65536)

    # The channel goes on.
    await remote.put(5, [Write(4096, b"y" * 4096)])
    await near.send(b"ok")
    assert (await far.recv()).header == b"ok"
    assert bytes(region.memory[4096:8192]) == b"y" * 4096


async def test_a_large_refused_put_writes_nothing(world: World) -> None:
    near, _ = await world.pair()
    region = world.far.create_region(9 << 20)
    region.open_window(5, [ByteRange(0, 8 << 20)])
    remote = await near.open_region(region.descriptor())
    for _ in range(2):
        with pytest.raises(PlacementRefused):
            await remote.put(5, [Write(0, b"x" * (8 << 20)), Write(8 << 20, b"x")])
        assert not any(region.memory[::4096])
    await remote.put(5, [Write(0, b"x" * (8 << 20))])
    assert bytes(region.memory[: 8 << 20]) == b"x" * (8 << 20)


async def test_a_window_that_closes_during_a_put(world: World) -> None:
    near, _ = await world.pair()
    region = world.far.create_region(32 << 20)
    region.open_window(5, [ByteRange(0, 32 << 20)])
    remote = await near.open_region(region.descriptor())
    putting = asyncio.create_task(remote.put(5, [Write(0, b"x" * (32 << 20))]))
    while not region.memory[0]:
        await asyncio.sleep(0)
    region.close_window(5)
    if region.receiver_copies:
        last = region.memory[-1]
        assert last == 0
    outcome = (await asyncio.gather(putting, return_exceptions=True))[0]
    if region.receiver_copies:
        assert isinstance(outcome, PlacementRefused)
        assert region.memory[-1] == last
    else:
        assert outcome is None or isinstance(outcome, PlacementRefused)
    # Either way the writer has been heard and stopped; the next one needs a window.
    with pytest.raises(PlacementRefused):
        await remote.put(5, [Write(0, b"x")])


async def test_puts_of_several_tasks_and_messages_between_them(world: World) -> None:
    near, far = await world.pair()
    region = world.far.create_region(40 << 18)
    region.open_window(1, [ByteRange(0, 40 << 18)])
    remote = await near.open_region(region.descriptor())

    async def put_and_tell(number: int) -> None:
        await remote.put(1, [Write(number << 18, bytes([number + 1]) * (1 << 18))])
        await near.send(bytes([number]))

    # 1. All at once, and one of them refused: the others do not notice.
    refused = asyncio.create_task(remote.put(2, [Write(0, b"x" * (3 << 20))]))
    putting = [asyncio.create_task(put_and_tell(number)) for number in range(40)]
    told = set()
    for _ in range(40):
        number = (await asyncio.wait_for(far.recv(), 5)).header[0]
        told.add(number)
        # 2. Whoever has told that its put returned has its bytes in place.
        assert bytes(region.memory[number << 18 : (number + 1) << 18]) == bytes([number + 1]) * (1 << 18)
    assert told == set(range(40))
    with pytest.raises(PlacementRefused):
        await refused
    await asyncio.gather(*putting)


async def test_puts_to_the_same_place_go_in_the_order_of_their_calls(world: World) -> None:
    near, _ = await world.pair()
    region = world.far.create_region(1 << 20)
    region.open_window(1, [ByteRange(0, 1 << 20)])
    remote = await near.open_region(region.descriptor())
    await asyncio.gather(*(remote.put(1, [Write(0, bytes([n]) * (1 << 20))]) for n in range(1, 21)))
    assert bytes(region.memory) == bytes([20]) * (1 << 20)


async def test_messages_do_not_wait_for_bulk_data(narrow: World) -> None:
    """A put of many times what may be on its way, and a message behind it that arrives long before its end."""
    near, far = await narrow.pair()
    region = narrow.far.create_region(256 << 20)
    region.open_window(1, [ByteRange(0, 256 << 20)])
    remote = await near.open_region(region.descriptor())
    source = memoryview(bytearray(256 << 20))
    putting = asyncio.create_task(remote.put(1, [Write(0, source)]))
    await asyncio.sleep(0)
    await asyncio.gather(near.send(b"urgent"), asyncio.wait_for(far.recv(), 5))
    assert not putting.done()
    near.abort()
    await asyncio.gather(putting, return_exceptions=True)
