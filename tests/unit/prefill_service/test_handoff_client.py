"""The hand-off client: nothing is given back or said to be over while a put still reads and writes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from engine.fake_runner import fake_layout
from prefill_service import handoff_client
from prefill_service.handoff_client import HandoffClient
from transport.base import Write
from wire.control import FailureKind, HandoffTicket
from wire.handoff import HandoffAbort, HandoffCancel, HandoffOpened, ToDecode
from wire.ids import BlockId, HandoffId, Incarnation, RequestId, WorkerId

REQUEST = RequestId("r")
HANDOFF = HandoffId("h")


class SlowLink:
    """A link whose put ends when the test says so."""

    def __init__(self) -> None:
        self.sent: list[ToDecode] = []
        self.put_may_end = asyncio.Event()

    def post(self, message: ToDecode) -> None:
        self.sent.append(message)

    async def put(self, key: int, writes: Sequence[Write]) -> None:
        await self.put_may_end.wait()


class Outcome:
    def __init__(self) -> None:
        self.released: list[RequestId] = []
        self.failed: list[str] = []

    def source_released(self, request_id: RequestId) -> None:
        self.released.append(request_id)

    def handoff_failed(self, request_id: RequestId, kind: FailureKind, reason: str) -> None:
        self.failed.append(reason)


def opened_handoff() -> tuple[HandoffClient, SlowLink, Outcome]:
    """A hand-off of one block that D has opened."""
    layout = fake_layout(16)
    link, outcome = SlowLink(), Outcome()
    client = HandoffClient(memoryview(bytearray(layout.block_bytes)), layout, outcome, lambda: 0.0)
    ticket = HandoffTicket(HANDOFF, WorkerId("decode-0"), Incarnation("d"), 1, (BlockId(0),), 0, 30.0)
    client.start(REQUEST, ticket, link)  # type: ignore[arg-type]
    client.on_handoff_message(link, HandoffOpened(HANDOFF))  # type: ignore[arg-type]
    return client, link, outcome


async def test_a_failing_checksum_waits_for_the_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. A put is under way. 2. The checksums beside it fail. 3. D is told and P frees its blocks only behind the put."""

    async def broken(blocks: Sequence[memoryview]) -> tuple[int, ...]:
        raise MemoryError("no checksum")

    monkeypatch.setattr(handoff_client, "checksums_off_loop", broken)
    client, link, outcome = opened_handoff()
    client.blocks_computed(REQUEST, 16, (BlockId(0),))
    for _ in range(5):
        await asyncio.sleep(0)
    assert outcome.released == []
    assert not any(isinstance(message, HandoffAbort) for message in link.sent)

    link.put_may_end.set()
    async with asyncio.timeout(2):
        while not outcome.released:
            await asyncio.sleep(0)
    assert isinstance(link.sent[-1], HandoffAbort)
    assert outcome.released == [REQUEST]
    assert "no checksum" in outcome.failed[0]
    assert client.num_open == 0


async def test_D_that_did_not_hear_the_end_is_told_again() -> None:
    """1. A hand-off is cancelled; D is told once. 2. D, which did not hear, asks. 3. It is told again: nothing writes."""
    client, link, outcome = opened_handoff()
    client.cancel(REQUEST, "client left")
    assert [type(message) for message in link.sent].count(HandoffAbort) == 1
    client.on_handoff_message(link, HandoffCancel(HANDOFF, "has it stopped?"))  # type: ignore[arg-type]
    assert [type(message) for message in link.sent].count(HandoffAbort) == 2
    assert outcome.released == [REQUEST]
    assert client.num_open == 0


async def test_no_answer_while_a_put_is_under_way() -> None:
    """D asks whether it has stopped: not before the put has ended."""
    client, link, outcome = opened_handoff()
    client.blocks_computed(REQUEST, 16, (BlockId(0),))
    for _ in range(3):
        client.on_handoff_message(link, HandoffCancel(HANDOFF, "has it stopped?"))  # type: ignore[arg-type]
        await asyncio.sleep(0)
    assert not any(isinstance(message, HandoffAbort) for message in link.sent)
    link.put_may_end.set()
    async with asyncio.timeout(5):
        while not outcome.released:
            await asyncio.sleep(0)
    assert isinstance(link.sent[-1], HandoffAbort)
