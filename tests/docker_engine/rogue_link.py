"""Runs in a container beside a cluster: tries to become a prefill worker's link to a decode worker, and says how it went.

rogue_link.py ADDRESS INCARNATION TOKEN KV_MEMORY; a token of the form file:PATH is read from there.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from engine.build import engine_shape
from prefill_service.decode_link import DecodeLink, LinkIdentity
from service_kit.process_mark import OwnMark
from service_kit.worker_settings import EngineSettings
from transport.options import TransportOptions
from transport.registry import create_transport
from wire.control import DecodePeer, Endpoint
from wire.handoff import ToPrefill
from wire.ids import Incarnation, WorkerId, new_incarnation

MODEL = Path("/var/lib/kvrelay/models/smollm2-135m")
LINK_S = 5.0


class Handler:
    def __init__(self) -> None:
        self.outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_link_up(self, link: DecodeLink) -> None:
        self._end("linked")

    def on_link_lost(self, link: DecodeLink, reason: str) -> None:
        self._end(f"refused: {reason}")

    def on_handoff_message(self, link: DecodeLink, message: ToPrefill) -> None:
        return

    def _end(self, text: str) -> None:
        if not self.outcome.done():
            self.outcome.set_result(text)


async def main(address: str, incarnation: str, token: str) -> str:
    if token.startswith("file:"):
        token = Path(token.removeprefix("file:")).read_text().strip()
    transport = create_transport("zmq", TransportOptions())
    peer = DecodePeer(WorkerId("decode"), Incarnation(incarnation), (Endpoint("zmq", address),))
    fingerprint = engine_shape(EngineSettings(), MODEL).fingerprint
    identity = LinkIdentity(WorkerId("rogue"), new_incarnation(), fingerprint, OwnMark().mark, token)
    handler = Handler()
    linking = asyncio.create_task(DecodeLink(peer, identity, {"zmq": transport}, handler, time.monotonic).run())
    try:
        async with asyncio.timeout(LINK_S):
            return await handler.outcome
    except TimeoutError:
        return "refused: no answer"
    finally:
        linking.cancel()
        await asyncio.gather(linking, return_exceptions=True)
        await transport.close()


print(asyncio.run(main(*sys.argv[1:4])))
