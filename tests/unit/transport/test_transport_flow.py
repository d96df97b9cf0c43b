from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.base import ByteRange, Write
from transport.buffers import copy_sliced, plan_put
from transport.errors import ChannelClosed, PlacementRefused
from transport.flow import CreditWindow, GrantAccount, Inbox, cost_of
from transport.liveness import Liveness, Verdict


@dataclass(frozen=True)
class Item:
    cost: int


async def test_credit_waits_wakes_and_ends() -> None:
    credit = CreditWindow(1000)
    await credit.take(900)
    waiting = asyncio.create_task(credit.take(200))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert credit.give(100)
    await waiting
    assert credit.in_flight == 1000
    assert not credit.give(1001)
    waiting = asyncio.create_task(credit.take(1))
    await asyncio.sleep(0)
    credit.end("over")
    with pytest.raises(ChannelClosed, match="over"):
        await waiting


async def test_the_largest_message_fits_an_empty_window() -> None:
    credit = CreditWindow(4096)
    await credit.take(cost_of(4096, 4096))
    assert credit.give(4096)
    assert credit.in_flight == 0


@given(st.lists(st.integers(0, 5000), max_size=50))
def test_sender_and_receiver_count_alike(sizes: list[int]) -> None:
    """Every item that the sender has credit for is one that the receiver accepts; in the end nothing is held."""
    limit = 8192
    account, in_flight, arrived = GrantAccount(limit), 0, list[int]()
    for size in sizes:
        cost = cost_of(size, limit)
        while in_flight + cost > limit:
            account.consumed(arrived.pop(0))
            in_flight -= account.take()
        in_flight += cost
        assert account.charge(size) == cost
        arrived.append(cost)
    for cost in arrived:
        account.consumed(cost)
    assert in_flight == account.take()
    assert account.charge(limit) == limit
    assert account.charge(0) is None


async def test_an_item_stays_until_it_was_used() -> None:
    inbox: Inbox[Item] = Inbox()
    reading = asyncio.create_task(inbox.first())
    await asyncio.sleep(0)
    item = Item(1)
    inbox.push(item)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert await inbox.first() is item
    inbox.discard("over")
    with pytest.raises(ChannelClosed, match="over"):
        inbox.remove(item)
    inbox.push(Item(2))
    with pytest.raises(ChannelClosed):
        await inbox.first()


async def test_a_finished_inbox_is_read_to_its_end() -> None:
    inbox: Inbox[Item] = Inbox()
    inbox.push(item := Item(1))
    inbox.finish("bye")
    assert await inbox.first() is item
    inbox.remove(item)
    with pytest.raises(ChannelClosed, match="bye"):
        await inbox.first()
    assert len(inbox) == 0


def test_liveness() -> None:
    life = Liveness(3.0, 6.0, now=0.0)
    assert life.interval_s == 1.0
    # 1. Nothing said for half an interval: say something.
    assert life.look(0.5) is Verdict.PULSE
    life.sent(0.5)
    assert life.look(0.9) is Verdict.FINE
    # 2. Traffic counts.
    life.heard(2.0)
    assert [life.look(t) for t in (1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5)][-1] is Verdict.PULSE
    # 3. Silence for liveness_s.
    assert life.look(5.0) is Verdict.DEAD


def test_an_own_stall_is_not_the_peers_silence() -> None:
    life = Liveness(3.0, 3.0, now=0.0)
    assert life.look(0.5) is Verdict.PULSE
    assert life.look(60.0) is not Verdict.DEAD  # this process slept; what came meanwhile waits unread
    verdicts = [life.look(60.0 + 0.5 * n) for n in range(1, 8)]
    assert verdicts[-1] is Verdict.DEAD


def test_a_put_is_planned() -> None:
    source = bytes(range(100))
    plan = plan_put(1, [Write(10, source[:20]), Write(30, source[20:50]), Write(80, b""), Write(5, source[50:55])], 100)
    assert plan.ranges == (ByteRange(10, 50), ByteRange(5, 5))
    assert plan.nbytes == 55
    pieces = list(plan.pieces(16))
    assert [sum(map(len, piece)) for piece in pieces] == [16, 16, 16, 7]
    assert b"".join(bytes(view) for piece in pieces for view in piece) == source[:55]
    many = plan_put(1, [Write(n, b"x") for n in range(0, 2000, 2)], 2000)
    assert max(len(piece) for piece in many.pieces(1 << 20)) <= 256
    assert sum(len(view) for piece in many.pieces(1 << 20) for view in piece) == 1000
    with pytest.raises(PlacementRefused, match="outside the region"):
        plan_put(1, [Write(90, source)], 100)


async def test_large_copies_let_the_loop_run() -> None:
    source, target = bytes([7]) * (9 << 20), bytearray(9 << 20)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await copy_sliced(memoryview(target), memoryview(source))
    counting.cancel()
    assert target == source
    assert turns >= 3
