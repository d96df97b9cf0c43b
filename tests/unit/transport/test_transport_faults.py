"""Fault rules are read strictly and strike when they say; each fault does to bytes what it is named after."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from transport.base import ByteRange, Channel, Region, RemoteRegion, Write
from transport.errors import ChannelClosed
from transport.fault_rules import FaultPlan, Operation, parse_rule
from transport.faults import FaultyTransport
from transport.inproc import InprocTransport
from transport.inproc_hub import InprocHub

KEY = 7
SIZE = 1 << 16


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plan(*rules: str, clock: Clock | None = None, path: Path | None = None) -> FaultPlan:
    return FaultPlan([parse_rule(rule) for rule in rules], clock or Clock(), path)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("explode:send", "action 'explode'"),
        ("drop", "operation ''"),
        ("drop:read", "operation 'read'"),
        ("drop:send:often", "'often'"),
        ("drop:send:often=1", "'often=1'"),
        ("drop:send:nth=0", "nth"),
        ("drop:send:nth=x", "nth"),
        ("drop:send:p=1.5", "p must"),
        ("drop:send:p=nan", "p must"),
        ("drop:send:p=0.5:p=0.6", "p must"),
        ("delay:put:seconds=-1", "seconds"),
        ("delay:put:seconds=inf", "seconds"),
        ("drop:put:header=x", "header"),
        ("drop:put:share=2", "share"),
    ],
)
def test_a_rule_that_means_nothing_is_refused_by_its_part(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=r"drop|explode|delay") as refused:
        parse_rule(text)
    assert named in str(refused.value)


def strikes(chosen: FaultPlan, times: int, header: bytes = b"") -> list[int]:
    return [number for number in range(1, times + 1) if chosen.strike("handoff", Operation.SEND, header)]


def test_when_a_rule_strikes() -> None:
    assert strikes(plan("drop:send"), 3) == [1, 2, 3]
    assert strikes(plan("drop:send:nth=2"), 4) == [2]
    assert strikes(plan("drop:send:count=2"), 4) == [1, 2]
    assert strikes(plan("drop:send:header=ack"), 2, b"\x01handoff-ack") == [1, 2]
    assert strikes(plan("drop:send:header=ack"), 2, b"\x01handoff") == []
    assert strikes(plan("drop:recv"), 2) == []
    assert strikes(plan("drop:send:link=control"), 2) == []
    half = strikes(plan("drop:send:p=0.5"), 1000)
    assert 400 < len(half) < 600
    assert half == strikes(plan("drop:send:p=0.5"), 1000), "the same every time"
    assert half != strikes(plan("drop:send:p=0.5:seed=1"), 1000)


def test_a_rule_has_its_time() -> None:
    clock = Clock()
    timed = plan("drop:send:after=5:for=10", clock=clock)
    found = []
    for second in range(20):
        clock.now = 100.0 + second
        if timed.strike("handoff", Operation.SEND):
            found.append(second)
    assert found == list(range(5, 15))


def test_a_file_of_rules_is_read_again_when_it_changes(tmp_path: Path) -> None:
    """1. None yet. 2. One rule. 3. Another one, whose count is new. 4. Nonsense changes nothing. 5. Gone."""
    path = tmp_path / "faults"
    watched = plan(path=path)
    assert strikes(watched, 2) == []
    for text, expected in (
        ("drop:send:nth=2\n", [2]),
        ("drop:send:nth=1\n\n", [1]),
        ("nonsense", []),
        ("drop:send", [1, 2]),
    ):
        fresh = tmp_path / "fresh"
        fresh.write_text(text)
        fresh.rename(path)
        assert strikes(watched, 2) == expected, text
    path.unlink()
    assert strikes(watched, 2) == []


@asynccontextmanager
async def joined(faults: FaultPlan) -> AsyncIterator[tuple[Channel, Channel, Region, RemoteRegion]]:
    """A dialer with faults, and the other end without: channels of both, the other end's region and the view of it."""
    hub = InprocHub()
    near, far = FaultyTransport(InprocTransport(hub), faults, "handoff"), InprocTransport(hub)
    accepted: asyncio.Queue[Channel] = asyncio.Queue()
    over = asyncio.Event()

    async def hold(channel: Channel) -> None:
        accepted.put_nowait(channel)
        await over.wait()

    region = far.create_region(SIZE)
    region.open_window(KEY, [ByteRange(0, SIZE)])
    listener = await far.listen("inproc://far", hold)
    channel = await near.connect("inproc://far", asyncio.get_running_loop().time() + 5)
    try:
        yield channel, await accepted.get(), region, await channel.open_region(region.descriptor())
    finally:
        over.set()
        channel.abort()
        await listener.close()
        await near.close()
        await far.close()


@pytest.mark.parametrize(
    ("rule", "arrive"),
    [
        ("drop:send:nth=2", ["one", "three"]),
        ("duplicate:send:nth=2", ["one", "two", "two", "three"]),
        ("reorder:send:nth=2", ["one", "three", "two"]),
        ("reorder:send:nth=3:seconds=0.01", ["one", "two", "three"]),
        ("delay:send:nth=2:seconds=0.05", ["one", "two", "three"]),
    ],
)
async def test_what_happens_to_a_message_that_is_sent(rule: str, arrive: list[str]) -> None:
    async with joined(plan(rule)) as (near, far, _, _):
        await asyncio.gather(*(near.send(text.encode(), [b"x"]) for text in ("one", "two", "three")))
        async with asyncio.timeout(5):
            received = [await far.recv() for _ in arrive]
        assert [message.header.decode() for message in received] == arrive
        assert {bytes(message.buffers[0]) for message in received} == {b"x"}


@pytest.mark.parametrize(
    ("rule", "arrive"),
    [
        ("drop:recv:nth=2", ["one", "three"]),
        ("duplicate:recv:nth=2", ["one", "two", "two", "three"]),
        ("reorder:recv:nth=2", ["one", "three", "two"]),
        ("reorder:recv:nth=3:seconds=0.01", ["one", "two", "three"]),
        ("delay:recv:nth=2:seconds=0.05", ["one", "two", "three"]),
    ],
)
async def test_what_happens_to_a_message_that_is_received(rule: str, arrive: list[str]) -> None:
    async with joined(plan(rule)) as (near, far, _, _):
        for text in ("one", "two", "three"):
            await far.send(text.encode())
        async with asyncio.timeout(5):
            assert [(await near.recv()).header.decode() for _ in arrive] == arrive


async def test_a_delayed_message_survives_the_cancellation_of_its_reader() -> None:
    async with joined(plan("delay:recv:nth=1:seconds=30")) as (near, far, _, _):
        await far.send(b"late")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await near.recv()
        assert (await near.recv()).header == b"late"


@pytest.mark.parametrize("operation", ["send", "recv"])
async def test_a_damaged_header_differs_in_one_bit(operation: str) -> None:
    async with joined(plan(f"corrupt:{operation}")) as (near, far, _, _):
        sender, receiver = (near, far) if operation == "send" else (far, near)
        await sender.send(b"header of a message")
        found = (await receiver.recv()).header
        assert sum((a ^ b).bit_count() for a, b in zip(found, b"header of a message", strict=True)) == 1


@pytest.mark.parametrize("operation", ["send", "recv", "put"])
async def test_a_cut_ends_the_channel_on_both_sides(operation: str) -> None:
    async with joined(plan(f"cut:{operation}")) as (near, far, _, remote):
        await far.send(b"waits")
        operations = {"send": near.send(b"lost"), "recv": near.recv(), "put": remote.put(KEY, [Write(0, b"x" * 100)])}
        chosen = operations.pop(operation)
        for other in operations.values():
            other.close()
        with pytest.raises(ChannelClosed):
            await chosen
        with pytest.raises(ChannelClosed):
            await far.recv()


PAYLOAD = bytes(range(256)) * 16


@pytest.mark.parametrize(
    "rule", ["delay:put:seconds=0.01", "duplicate:put", "reorder:put", "drop:put:nth=2", "drop:put:share=0"]
)
async def test_puts_that_come_out_whole(rule: str) -> None:
    async with joined(plan(rule)) as (_, _, region, remote):
        await remote.put(KEY, [Write(0, PAYLOAD[:1000]), Write(5000, PAYLOAD[1000:])])
        assert bytes(region.memory[:1000]) + bytes(region.memory[5000 : 4000 + len(PAYLOAD)]) == PAYLOAD


async def test_puts_that_lose_or_damage_bytes() -> None:
    async with joined(plan("drop:put:nth=1", "drop:put:nth=2:share=0.25", "corrupt:put:nth=3")) as (_, _, region, remote):
        here = region.memory[: len(PAYLOAD)]
        await remote.put(KEY, [Write(0, PAYLOAD)])
        assert bytes(here) == bytes(len(PAYLOAD))
        await remote.put(KEY, [Write(0, PAYLOAD)])
        assert bytes(here) == PAYLOAD[:3072] + bytes(1024)
        await remote.put(KEY, [Write(0, PAYLOAD[:2000]), Write(2000, PAYLOAD[2000:])])
        assert sum((a ^ b).bit_count() for a, b in zip(here, PAYLOAD, strict=True)) == 1
