"""Keeps P linked to every decode worker that the coordinator names, and tells the coordinator which links hold."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress

from prefill_service.decode_link import DecodeLink, LinkHandler, LinkIdentity
from service_kit.backoff import Backoff
from transport.base import Transport
from wire.control import DecodePeer, LinkReport, WorkerMessage
from wire.handoff import ToPrefill
from wire.ids import Incarnation

log = logging.getLogger(__name__)


class LinkManager:
    """One task per decode incarnation: link, and link again with backoff for as long as the coordinator names it.

    Args:
        handler: hears of links and their messages (the hand-off client).
        report: sends to the coordinator.
    """

    def __init__(
        self,
        identity: LinkIdentity,
        transports: Mapping[str, Transport],
        handler: LinkHandler,
        report: Callable[[WorkerMessage], None],
        clock: Callable[[], float],
    ) -> None:
        self._identity = identity
        self._transports = transports
        self._handler = handler
        self._report = report
        self._clock = clock
        self._peers: dict[Incarnation, DecodePeer] = {}
        self._tasks: dict[Incarnation, asyncio.Task[None]] = {}
        self._links: dict[Incarnation, DecodeLink] = {}
        self._ending: dict[Incarnation, set[asyncio.Task[None]]] = {}  # dropped, with a put that has not ended yet

    def link_to(self, incarnation: Incarnation) -> DecodeLink | None:
        """The link to a decode incarnation, if it is up."""
        link = self._links.get(incarnation)
        return link if link is not None and link.up else None

    @property
    def links(self) -> list[DecodeLink]:
        return [link for link in self._links.values() if link.up]

    def set_peers(self, peers: tuple[DecodePeer, ...]) -> None:
        """Link to those that are new, drop those that are gone, and report the state of all others again (a new coordinator
        knows nothing of them)."""
        wanted = {peer.incarnation: peer for peer in peers}
        for incarnation in self._tasks.keys() - wanted.keys():
            self._drop(incarnation, self._tasks.pop(incarnation))
        for incarnation, peer in wanted.items():
            if incarnation not in self._tasks:
                self._tasks[incarnation] = asyncio.create_task(self._keep_linked(peer), name=f"link-{peer.worker_id}")
            elif (link := self.link_to(incarnation)) is not None:
                self._report_up(link)

    def _drop(self, incarnation: Incarnation, task: asyncio.Task[None]) -> None:
        ending = self._ending.setdefault(incarnation, set())
        ending.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            ending.discard(task)
            if not ending and self._ending.get(incarnation) is ending:
                del self._ending[incarnation]

        task.cancel()
        task.add_done_callback(ended)

    async def close(self) -> None:
        for incarnation in list(self._tasks):
            self._drop(incarnation, self._tasks.pop(incarnation))
        for task in [task for ending in self._ending.values() for task in ending]:
            with suppress(asyncio.CancelledError):
                await task

    async def _keep_linked(self, peer: DecodePeer) -> None:
        # A Hello says that nothing of a former link writes any more: a peer that was dropped and is named again must wait.
        if ending := self._ending.get(peer.incarnation):
            await asyncio.wait(set(ending))
        backoff = Backoff()
        while True:
            link = DecodeLink(peer, self._identity, self._transports, self, self._clock)
            try:
                await link.run()
            finally:
                if self._links.get(peer.incarnation) is link:
                    del self._links[peer.incarnation]
            if link.transport:
                backoff.reset()
            await asyncio.sleep(backoff.next_delay())

    # -- LinkHandler ----------------------------------------------------------------------------------------------------

    def on_link_up(self, link: DecodeLink) -> None:
        self._links[link.peer.incarnation] = link
        log.info(
            "linked to %s over %s%s, %.1f GB/s%s",
            link.peer.worker_id,
            link.transport,
            f" ({link.path})" if link.path else "",
            link.gb_per_s,
            f" (fallback: {link.fallback_reason})" if link.fallback_reason else "",
        )
        self._handler.on_link_up(link)
        self._report_up(link)

    def on_link_lost(self, link: DecodeLink, reason: str) -> None:
        log.warning("no link to %s: %s", link.peer.worker_id, reason)
        self._handler.on_link_lost(link, reason)
        self._report(LinkReport(link.peer.worker_id, link.peer.incarnation, up=False, reason=reason))

    def on_handoff_message(self, link: DecodeLink, message: ToPrefill) -> None:
        self._handler.on_handoff_message(link, message)

    def _report_up(self, link: DecodeLink) -> None:
        peer = link.peer
        self._report(
            LinkReport(
                peer.worker_id, peer.incarnation, True, link.transport, link.gb_per_s, link.fallback_reason, link.path
            )
        )
