"""A decode worker that is dropped and named again: no Hello before the last put of its former link has ended."""

from __future__ import annotations

import asyncio
from typing import ClassVar

import pytest

from prefill_service import link_manager
from prefill_service.decode_link import LinkIdentity
from prefill_service.link_manager import LinkManager
from service_kit.process_mark import OwnMark
from wire.control import DecodePeer, WorkerMessage
from wire.handoff import ToPrefill
from wire.ids import Incarnation, WorkerId
from wire.kv_layout import Fingerprint

D = DecodePeer(WorkerId("decode-0"), Incarnation("d"), ())


class SlowLink:
    """Links at once; dropped, it waits for its put."""

    made: ClassVar[list[SlowLink]] = []

    def __init__(self, peer: DecodePeer, identity: object, transports: object, handler: LinkManager, clock: object) -> None:
        self.peer = peer
        self.transport, self.gb_per_s, self.fallback_reason, self.path = "zmq", 1.0, "", ""
        self.up = False
        self.put_ended = asyncio.Event()
        self._handler = handler
        self.made.append(self)

    async def run(self) -> None:
        self.up = True
        self._handler.on_link_up(self)  # type: ignore[arg-type]
        try:
            await asyncio.Event().wait()
        finally:
            self.up = False
            await self.put_ended.wait()


class Handler:
    def on_link_up(self, link: object) -> None:
        return

    def on_link_lost(self, link: object, reason: str) -> None:
        return

    def on_handoff_message(self, link: object, message: ToPrefill) -> None:
        return


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_peer_that_is_named_again_waits_for_the_former_links_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. Linked. 2. Dropped while a put runs (a new coordinator does not know D yet), and named again, twice. 3. No new
    link. 4. The put ends: one new link, and it stays the one that hand-offs go by."""
    monkeypatch.setattr(link_manager, "DecodeLink", SlowLink)
    monkeypatch.setattr(SlowLink, "made", [])
    mark = OwnMark()
    identity = LinkIdentity(WorkerId("p"), Incarnation("p"), Fingerprint("m", "l"), mark.mark, "")
    reported: list[WorkerMessage] = []
    links = LinkManager(identity, {}, Handler(), reported.append, lambda: 0.0)
    try:
        links.set_peers((D,))
        await settle()
        (first,) = SlowLink.made
        assert links.link_to(D.incarnation) is first  # type: ignore[comparison-overlap]

        for _ in range(2):
            links.set_peers(())
            await settle()
            links.set_peers((D,))
            await settle()
        assert SlowLink.made == [first]
        assert links.link_to(D.incarnation) is None

        first.put_ended.set()
        await settle()
        _, second = SlowLink.made
        assert links.link_to(D.incarnation) is second  # type: ignore[comparison-overlap]
        second.put_ended.set()
    finally:
        await links.close()
        mark.close()
    assert links.link_to(D.incarnation) is None
