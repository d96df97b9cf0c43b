"""Closing and aborting, by either side."""

from __future__ import annotations

import asyncio

import pytest
from transport_world import World, ended, fill, soon

from transport.base import ByteRange, Channel, Write
from transport.errors import ChannelClosed, ConnectTimeout, TransportError


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


@pytest.mark.parametrize("who", ["writer", "owner"])
@pytest.mark.parametrize("how", ["abort", "close"])
async def test_a_put_that_has_raised_writes_no_more(world: World, who: str, how: str) -> None:
    """The channel has ended and the put has raised. A writer that writes by itself writes nothing after that; of one whose
    bytes the owner copies, some may still be on their way, and the closed window keeps them out."""
    near, far = await world.pair()
    nbytes = 64 << 20
    region = world.far.create_region(nbytes)
    region.open_window(1, [ByteRange(0, nbytes)])
    remote = await near.open_region(region.descriptor())
    source = memoryview(b"x" * nbytes)
    putting = asyncio.create_task(remote.put(1, [Write(0, source)]))
    while not region.memory[0] and not putting.done():
        await asyncio.sleep(0)
    end = near if who == "writer" else far
    if how == "abort":
        end.abort()
    else:
        await end.close()
    outcome = (await asyncio.gather(putting, return_exceptions=True))[0]
    assert outcome is None or isinstance(outcome, ChannelClosed)
    if region.receiver_copies:
        region.close_window(1)
    before = bytes(region.memory[::4096])
    if outcome is None:
        assert before == b"x" * len(before)
    with pytest.raises(ChannelClosed):
        await remote.put(1, [Write(0, b"y")])
    await asyncio.sleep(0.05)
    assert bytes(region.memory[::4096]) == before


@pytest.mark.parametrize("world", ["zmq-tcp", "zmq-ipc"], indirect=True)  # the others' messages go over the same sockets
async def test_connections_that_end_under_full_load_end_nothing_else(world: World) -> None:
    """libzmq 4.3.5 aborts the whole process when it is asked for certain things then; see transport/zmq_sockets.py.

    A child process, since the failure is its death: pairs of transports in it, one floods the other and is closed while the
    other's input is full; its sockets live on for longer than a heartbeat.
    """
    child = world.spawn("collapse", world.address(), 0.3)
    assert await asyncio.to_thread(child.wait, 60) == 0
