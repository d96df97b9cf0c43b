"""Dispatcher and hub with scripted workers over the inproc transport, for one test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from placement_fakes import FakeWorker, worker_info

from coordinator.control_hub import ControlHub
from coordinator.dispatcher import Dispatcher
from coordinator.generation import Generation
from coordinator.placement_settings import PlacementSettings
from transport.inproc import InprocTransport
from transport.inproc_hub import InprocHub
from wire.control import Role
from wire.ids import Incarnation
from wire.sequence import FinishReason

ADDRESS = "inproc://control"


@dataclass
class Bench:
    dispatcher: Dispatcher
    transport: InprocTransport
    workers: list[FakeWorker] = field(default_factory=list)

    async def worker(
        self, name: str, role: Role, incarnation: str | None = None, token: str = "", **info: object
    ) -> FakeWorker:
        worker = FakeWorker(self.transport, worker_info(name, role, incarnation, **info), token)
        self.workers.append(worker)
        await worker.join(ADDRESS)
        return worker

    async def pair(self) -> tuple[FakeWorker, FakeWorker]:
        prefill, decode = await self.worker("p0", Role.PREFILL), await self.worker("d0", Role.DECODE)
        await self.until(lambda: bool(self.dispatcher.view.usable_pairs()))
        return prefill, decode

    async def until(self, holds: Callable[[], bool], timeout_s: float = 5.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not holds():
                await asyncio.sleep(0.005)

    async def everything_empty(self) -> None:
        await self.until(self.dispatcher.holds_nothing)
        await self.until(lambda: not any(worker.holds for worker in self.workers if not worker.ended))


@contextlib.asynccontextmanager
async def bench(**changes: object) -> AsyncIterator[Bench]:
    values: dict[str, object] = {"policy": "always", "tick_s": 0.01}
    settings = PlacementSettings(**(values | changes))  # type: ignore[arg-type]
    shared = InprocHub()
    transport, workers_transport = InprocTransport(shared), InprocTransport(shared)
    dispatcher = Dispatcher(settings, Incarnation("c1"))
    hub = ControlHub(transport, dispatcher, handshake_timeout_s=0.5)
    dispatcher.start()
    await hub.listen(ADDRESS)
    made = Bench(dispatcher, workers_transport)
    try:
        yield made
        await made.everything_empty()
    finally:
        await dispatcher.close()
        await hub.close()
        await transport.close()
        await workers_transport.close()
        for worker in made.workers:
            await worker.stop()
    assert dispatcher.view.members == {}


async def read(generation: Generation) -> tuple[list[int], FinishReason | None]:
    got: list[int] = []
    finish = None
    async with asyncio.timeout(10):
        async for tokens in generation:
            assert finish is None
            got += [token.token_id for token in tokens.tokens]
            finish = tokens.finish
    return got, finish
