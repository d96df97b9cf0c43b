"""Every rule of `transport/base.py`, over every transport. After each test nothing is left: no descriptor, thread, file."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from transport_world import KINDS, LeakCheck, World, eventually, shm_entries, soon, warm_up_pyzmq

from transport.base import ByteRange, Channel, Write
from transport.errors import AddressError, ChannelClosed, ConnectTimeout, PlacementRefused, TransportError

SMALL_LIMIT = 64 << 10


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm_up_pyzmq()


@pytest.fixture(params=KINDS)
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    async for made in make_world(request.param, tmp_path):
        yield made


@pytest.fixture(params=KINDS)
async def narrow(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """Little may be on its way."""
    async for made in make_world(request.param, tmp_path, max_in_flight_bytes=SMALL_LIMIT, max_message_bytes=SMALL_LIMIT):
        yield made


@pytest.fixture(params=[kind for kind in KINDS if kind != "inproc"])
async def apart(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """Transports that connect processes."""
    async for made in make_world(request.param, tmp_path, liveness_s=0.4):
        yield made


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


# Messages


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


async def test_one_reader_and_one_writer_at_a_time(narrow: World) -> None:
    near, far = await narrow.pair()
    reading = asyncio.create_task(near.recv())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="another task"):
        await near.recv()
    for _ in range(2):
        await far.send(b"fill", [bytes(SMALL_LIMIT - 1000)])
        writing = asyncio.create_task(far.send(b"more", [bytes(SMALL_LIMIT - 1000)]))
        await asyncio.sleep(0.01)
        if not writing.done():
            with pytest.raises(RuntimeError, match="another task"):
                await far.send(b"x")
            break
        await near.recv()
    await asyncio.wait_for(reading, 2)
    near.abort()
    await asyncio.gather(writing, return_exceptions=True)


# Flow


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


# Placement


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


async def test_puts_larger_than_what_may_be_on_its_way(narrow: World) -> None:
    near, _ = await narrow.pair()
    region = narrow.far.create_region(1 << 20)
    region.open_window(5, [ByteRange(0, 1 << 20)])
    remote = await near.open_region(region.descriptor())
    source = os.urandom(1 << 20)
    await asyncio.wait_for(remote.put(5, [Write(0, source)]), 10)
    assert bytes(region.memory) == source


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


# Cancelling


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


async def fill(channel: Channel) -> None:
    while True:
        await channel.send(b"x", [bytes(10_000)])


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


# The end


async def test_close_flushes_and_ends_both_sides(world: World) -> None:
    near, far = await world.pair()
    for number in range(50):
        await near.send(str(number).encode(), [bytes(100_000)])
    await near.close()
    await near.close()
    near.abort()
    await ended(near)
    for number in range(50):
        assert (await asyncio.wait_for(far.recv(), 2)).header == str(number).encode()
    await ended(far)
    await far.close()
    far.abort()


async def test_both_sides_close_at_once(world: World) -> None:
    near, far = await world.pair()
    await near.send(b"a")
    await far.send(b"b")
    start = soon(0)
    await asyncio.gather(near.close(), far.close())
    assert soon(0) - start < 0.5
    await ended(near)
    await ended(far)


@pytest.mark.parametrize("side", ["dialer", "acceptor"])
async def test_abort_ends_both_sides_and_wakes_who_waits(world: World, side: str) -> None:
    near, far = await world.pair()
    waiting = [asyncio.create_task(near.recv()), asyncio.create_task(far.recv())]
    await asyncio.sleep(0.01)
    (near if side == "dialer" else far).abort()
    (near if side == "dialer" else far).abort()
    outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 2)
    assert [type(outcome) for outcome in outcomes] == [ChannelClosed, ChannelClosed]
    await ended(near)
    await ended(far)


async def test_the_end_wakes_a_waiting_sender_and_ends_remote_regions(narrow: World) -> None:
    near, far = await narrow.pair()
    region = narrow.far.create_region(4096)
    region.open_window(1, [ByteRange(0, 4096)])
    remote = await near.open_region(region.descriptor())
    sending = asyncio.create_task(fill(near))
    await asyncio.sleep(0.05)
    await far.close()
    with pytest.raises(ChannelClosed):
        await asyncio.wait_for(sending, 2)
    with pytest.raises(ChannelClosed):
        await remote.put(1, [Write(0, b"x")])
    assert bytes(region.memory) == bytes(4096)


async def test_a_channel_ends_with_its_handler(world: World) -> None:
    async def say_and_return(channel: Channel) -> None:
        await channel.recv()

    async def fail(channel: Channel) -> None:
        await channel.recv()
        raise RuntimeError("handler broke")

    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    for handler in (say_and_return, fail):
        listener = await world.far.listen(world.address(), handler)
        near = await world.near.connect(listener.address, soon(5))
        await near.send(b"go")
        await ended(near)
    assert [str(context["exception"]) for context in reported] == ["handler broke"]


async def test_closing_a_listener_aborts_its_channels(world: World) -> None:
    listener, accepted = await world.listener()
    near = await world.near.connect(listener.address, soon(5))
    far = await accepted.get()
    await listener.close()
    await listener.close()
    await ended(near)
    await ended(far)
    with pytest.raises(ConnectTimeout):
        await world.near.connect(listener.address, soon(0.2))


async def test_closing_a_transport_ends_its_channels(world: World) -> None:
    near, far = await world.pair()
    region = world.near.create_region(4096)
    await world.near.close()
    await world.near.close()
    await ended(near)
    await ended(far)
    with pytest.raises(TransportError):
        region.open_window(1, [])
    with pytest.raises(TransportError):
        world.near.create_region(4096)
    with pytest.raises(TransportError):
        await world.near.connect(world.address().replace(":0", ":9"), soon(1))
    with pytest.raises(TransportError):
        await world.near.listen(world.address(), fill)


# Connecting


async def test_nobody_answers(world: World) -> None:
    listener, _ = await world.listener()
    address = listener.address
    await listener.close()
    for wait_s in (0.0, 0.3):
        start = soon(0)
        with pytest.raises(ConnectTimeout):
            await world.near.connect(address, start + wait_s)
        assert wait_s <= soon(0) - start < wait_s + 0.5


async def test_a_dialer_may_come_first(world: World) -> None:
    listener, _ = await world.listener()
    address = listener.address
    await listener.close()
    connecting = asyncio.create_task(world.near.connect(address, soon(5)))
    await asyncio.sleep(0.1)

    async def echo(channel: Channel) -> None:
        await channel.send((await channel.recv()).header)
        await channel.recv()

    await world.far.listen(address, echo)
    near = await connecting
    await near.send(b"hello")
    assert (await near.recv()).header == b"hello"


MALFORMED = [
    "",
    "nonsense",
    "http://a:1",
    "tcp://",
    "tcp://a",
    "tcp://a:b",
    "tcp://a:99999",
    "ipc://",
    "inproc://",
    "inproc://a b",
]


@pytest.mark.parametrize("address", [*MALFORMED, "ipc://" + "x" * 200, "ipc:///no/such/folder/socket"])
async def test_malformed_addresses(world: World, address: str) -> None:
    with pytest.raises(AddressError):
        await world.near.listen(address, fill)
    if "/no/such" not in address:
        with pytest.raises(AddressError):
            await world.near.connect(address, soon(1))


async def test_an_address_in_use(world: World) -> None:
    listener, _ = await world.listener()
    assert not listener.address.endswith(":0")
    for transport in (world.near, world.far):
        with pytest.raises(AddressError):
            await transport.listen(listener.address, fill)
    # The one who has it still works; and when it closes, the address is free at once.
    await world.near.connect(listener.address, soon(5))
    await listener.close()
    successor = await world.near.listen(listener.address, fill)
    await world.far.connect(successor.address, soon(5))


# Death


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
    assert bool(stale) == (role == "listen" and apart.kind != "zmq-tcp")
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


async def test_segments_have_an_owner(apart: World) -> None:
    region = apart.near.create_region(4096)
    expected = 1 if apart.scheme == "shm" else 0
    assert len(shm_entries()) == expected
    apart.far.create_region(4096).close()  # a janitor of another transport leaves it alone
    assert len(shm_entries()) == expected
    region.close()
    assert not shm_entries()
