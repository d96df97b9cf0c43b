"""Regions and windows, seen by their owner."""

from __future__ import annotations

import numpy as np
import pytest
from transport_world import World, shm_entries, soon

from transport.base import ByteRange, Write
from transport.errors import PlacementRefused, TransportError


async def test_windows_of_the_owner(world: World) -> None:
    region = world.near.create_region(8192)
    region.open_window(1, [ByteRange(0, 10)])
    with pytest.raises(ValueError, match="in use"):
        region.open_window(1, [ByteRange(0, 10)])
    for bad in (ByteRange(8192, 1), ByteRange(-1, 2), ByteRange(0, 8193), ByteRange(0, -1)):
        with pytest.raises(ValueError, match="outside the region"):
            region.open_window(2, [bad])
    with pytest.raises(ValueError, match="64-bit"):
        region.open_window(2**64, [ByteRange(0, 1)])
    region.close_window(1)
    region.close_window(1)
    region.close_window(99)
    region.open_window(1, [ByteRange(0, 10)])
    region.close_window(1)


async def test_region_memory(world: World) -> None:
    region = world.near.create_region(10_000)
    assert region.memory.nbytes == 10_000
    assert bytes(region.memory) == bytes(10_000)
    assert np.frombuffer(region.memory, np.uint8).ctypes.data % 4096 == 0
    region.memory[9_999] = 1
    region.close()
    region.close()
    for bad in (0, -1):
        with pytest.raises(ValueError, match="nbytes"):
            world.near.create_region(bad)


async def test_a_large_region_is_there_at_once(world: World) -> None:
    start = soon(0)
    region = world.near.create_region(1 << 30)
    assert soon(0) - start < 0.5
    assert region.memory[-1] == 0
    region.close()


async def test_memory_lent_by_the_application(world: World) -> None:
    memory = memoryview(bytearray(8192))
    if world.near.owns_memory:
        with pytest.raises(ValueError, match="memory"):
            world.near.create_region(8192, memory)
        return
    for bad in (memory[:100], memory.toreadonly()):
        with pytest.raises(ValueError, match="memory"):
            world.near.create_region(8192, bad)
    # Two transports' worth of regions over the same bytes.
    near, _ = await world.pair()
    first, second = (world.far.create_region(8192, memory) for _ in range(2))
    first.open_window(1, [ByteRange(0, 8192)])
    remote = await near.open_region(first.descriptor())
    await remote.put(1, [Write(10, b"abc")])
    assert bytes(memory[10:13]) == b"abc" == bytes(second.memory[10:13])
    first.close()
    memory[0] = 1  # still the caller's
    second.close()
    memory.release()


async def test_descriptors_of_something_else(world: World) -> None:
    near, _ = await world.pair()
    region = world.far.create_region(4096)
    good = region.descriptor()
    for bad in (
        b"",
        b"x" * 5,
        good[:-1],
        good + b"x",
        b"y" + good[1:],
        good[:8] + bytes(len(good) - 8),
        good[:30] + b"0" * 20,
    ):
        with pytest.raises(TransportError):
            await near.open_region(bad)
    region.close()
    with pytest.raises(TransportError):
        await near.open_region(good)


async def test_a_closed_region_refuses(world: World) -> None:
    near, _ = await world.pair()
    region = world.far.create_region(4096)
    region.open_window(1, [ByteRange(0, 4096)])
    remote = await near.open_region(region.descriptor())
    region.close_window(1)
    region.close()
    with pytest.raises(PlacementRefused):
        await remote.put(1, [Write(0, b"x")])


async def test_segments_have_an_owner(apart: World) -> None:
    region = apart.near.create_region(4096)
    expected = 1 if apart.scheme == "shm" else 0
    assert len(shm_entries()) == expected
    apart.far.create_region(4096).close()  # a janitor of another transport leaves it alone
    assert len(shm_entries()) == expected
    region.close()
    assert not shm_entries()
