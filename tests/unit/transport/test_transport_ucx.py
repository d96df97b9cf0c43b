"""What only UCX has: lanes, and peers that break the rules of theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from transport.base import ByteRange, Channel, Region, Write
from transport.errors import ChannelClosed, PlacementRefused, TransportError
from transport.options import TransportOptions
from transport.registry import create_transport
from transport.ucx import is_installed
from transport.ucx_frames import Done, Grant, Open, Opened, Outcome, Put, encode_aside
from transport.ucx_transport import UcxTransport
from transport.zmq_channel import ZmqChannel

pytestmark = pytest.mark.skipif(not is_installed(), reason="ucxx is not installed (extra: ucx)")

NBYTES = 32 << 20


class Pair:
    """A writer, and an owner with a region of which the first half is open under key 1 and the second under key 2."""

    def __init__(self) -> None:
        options = TransportOptions(liveness_s=0.5)
        self.near, self.far = UcxTransport(options), UcxTransport(options)
        self._over = asyncio.Event()
        self.writer: ZmqChannel
        self.owner: ZmqChannel
        self.region: Region

    async def start(self) -> None:
        accepted: asyncio.Queue[Channel] = asyncio.Queue()

        async def keep(channel: Channel) -> None:
            await accepted.put(channel)
            await self._over.wait()

        listener = await self.far.listen("ucx://127.0.0.1:0", keep)
        dialed = await self.near.connect(listener.address, asyncio.get_running_loop().time() + 5)
        taken = await accepted.get()
        assert isinstance(dialed, ZmqChannel)
        assert isinstance(taken, ZmqChannel)
        self.writer, self.owner = dialed, taken
        self.region = self.far.create_region(NBYTES)
        self.region.open_window(1, [ByteRange(0, NBYTES // 2)])
        self.region.open_window(2, [ByteRange(NBYTES // 2, NBYTES // 2)])

    async def close(self) -> None:
        self._over.set()
        await self.near.close()
        await self.far.close()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    await made.start()
    yield made
    await made.close()


async def test_the_transport_that_ucx_chose_is_visible(pair: Pair) -> None:
    remote = await pair.writer.open_region(pair.region.descriptor())
    interfaces = {path.name for path in Path("/sys/class/net").iterdir()}
    chosen = {name.partition("/") for name in remote.path.split(", ")}
    assert chosen
    for transport, _, device in chosen:
        assert transport != "tcp" or device in interfaces
    await pair.near.close()
    assert not remote.path


async def test_a_window_that_closes_costs_other_puts_only_time(pair: Pair) -> None:
    """1. Two puts under way; 2. the window of one closes: its memory changes no more; 3. the other one is done again."""
    remote = await pair.writer.open_region(pair.region.descriptor())
    half = NBYTES // 2
    first = asyncio.create_task(remote.put(1, [Write(0, b"a" * half)]))
    second = asyncio.create_task(remote.put(2, [Write(half, b"b" * half)]))
    while not pair.region.memory[0]:
        await asyncio.sleep(0)
    pair.region.close_window(1)
    before = bytes(pair.region.memory[:half:4096])
    assert b"\0" in before
    with pytest.raises(PlacementRefused):
        await first
    await asyncio.wait_for(second, 5)
    assert bytes(pair.region.memory[half::4096]) == b"b" * (half // 4096)
    assert bytes(pair.region.memory[:half:4096]) == before
    # Afterwards the channel is as good as new.
    await remote.put(2, [Write(half, b"c")])
    await pair.writer.send(b"after")
    assert (await pair.owner.recv()).header == b"after"
    assert pair.region.memory[half] == ord("c")


@pytest.mark.parametrize(
    "aside",
    [
        b"garbage",
        encode_aside(Grant(1, 1)),
        encode_aside(Done(1, Outcome.PLACED)),
        encode_aside(Opened(1, (1, 21), b"", "no")),
        encode_aside(Open(1, (1, 21), bytes(16), b"from who was given no region")),
        encode_aside(Open(1, (0, 9), bytes(16), b"of another version")),
        encode_aside(Put(1, 7, bytes(16), 1, (ByteRange(0, 1),))),
    ],
)
async def test_asides_out_of_place(pair: Pair, aside: bytes) -> None:
    """Nothing is written, and the channel ends or goes on as if it had heard nothing."""
    pair.writer.tell_aside(aside)
    await asyncio.sleep(0.05)
    assert not any(pair.region.memory[::4096])
    if aside == b"garbage":
        with pytest.raises(ChannelClosed, match="protocol violation"):
            await pair.owner.recv()
        return
    await pair.writer.send(b"x")
    assert (await asyncio.wait_for(pair.owner.recv(), 2)).header == b"x"


async def test_puts_that_run_backwards_end_the_channel(pair: Pair) -> None:
    remote = await pair.writer.open_region(pair.region.descriptor())
    await remote.put(1, [Write(0, b"x")])
    pair.writer.tell_aside(encode_aside(Put(1, 1, bytes(16), 1, (ByteRange(0, 1),))))
    with pytest.raises(ChannelClosed, match="out of turn"):
        await asyncio.wait_for(pair.owner.recv(), 2)


async def test_an_owner_whose_lane_fails_is_given_up(pair: Pair) -> None:
    """The messages still go, UCX does not: the channel has no use, and ends."""
    remote = await pair.writer.open_region(pair.region.descriptor())
    ends = pair.far._regions._ends[pair.owner]  # type: ignore[attr-defined]
    ends._owner._lane.close()
    putting = asyncio.create_task(remote.put(1, [Write(0, b"x" * (1 << 20))]))
    with pytest.raises(ChannelClosed):
        await asyncio.wait_for(putting, 5)


def test_without_ucxx_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ucxx._lib.libucxx", None)
    with pytest.raises(TransportError, match=r"kvrelay\[ucx\]"):
        create_transport("ucx", TransportOptions())
