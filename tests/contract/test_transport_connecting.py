"""Addresses, and who answers there."""

from __future__ import annotations

import asyncio

import pytest
from transport_world import World, fill, soon

from transport.base import Channel
from transport.errors import AddressError, ConnectTimeout


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
    listener = await world.far.listen(world.address(), fill)
    assert not listener.address.endswith(":0")
    for transport in (world.near, world.far):
        with pytest.raises(AddressError):
            await transport.listen(listener.address, fill)
    # The one who has it still works; and when it closes, the address is free at once.
    await world.near.connect(listener.address, soon(5))
    await listener.close()
    successor = await world.near.listen(listener.address, fill)
    await world.far.connect(successor.address, soon(5))
