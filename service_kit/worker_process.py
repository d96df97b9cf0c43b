"""The life of a worker's process, the same for prefill and decode: register, serve, drain, leave."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Protocol

from service_kit.control_link import ControlLink, RegistrationRefused
from service_kit.lifecycle import Lifecycle
from transport.errors import TransportError
from wire.control import Leaving, WorkerLoad
from wire.ids import Incarnation

log = logging.getLogger(__name__)

TICK_S = 0.1
GOODBYE_S = 1.0

EXIT_OK = 0
EXIT_ENGINE_DEAD = 1
EXIT_REFUSED = 3


class WorkerService(Protocol):
    """What the process needs of its service."""

    @property
    def draining(self) -> bool: ...

    @property
    def idle(self) -> bool:
        """Nothing runs and nobody is still to fetch anything."""

    def begin_drain(self) -> None: ...

    def tick(self) -> None:
        """Called every TICK_S: leases, dead peers."""

    def load(self) -> WorkerLoad: ...


async def serve_worker(
    lifecycle: Lifecycle, service: WorkerService, link: ControlLink, incarnation: Incarnation, engine_dead: asyncio.Event
) -> int:
    """Serve until told to stop; returns the exit code. The caller starts and stops what the service is made of."""
    registration = asyncio.create_task(link.run(), name="control-link")
    ticker = asyncio.create_task(_tick(service, lifecycle), name="ticker")
    stop = asyncio.create_task(lifecycle.stop_requested(), name="stop-requested")
    dead = asyncio.create_task(engine_dead.wait(), name="engine-dead")
    tasks = (registration, ticker, stop, dead)
    lifecycle.ready()
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if dead.done():
            await _say_goodbye(link, incarnation)
            return EXIT_ENGINE_DEAD
        if registration.done():
            return _registration_ended(registration)
        if ticker.done():
            ticker.result()
        service.begin_drain()
        await _until_idle(service, lifecycle.drain_deadline)
        await _say_goodbye(link, incarnation)
        return EXIT_OK
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, RegistrationRefused):
                await task


def _registration_ended(registration: asyncio.Task[None]) -> int:
    error = registration.exception()
    if not isinstance(error, RegistrationRefused):
        raise error or RuntimeError("the control link ended by itself")
    log.error("the coordinator refuses this worker: %s", error)
    return EXIT_REFUSED


async def _tick(service: WorkerService, lifecycle: Lifecycle) -> None:
    while True:
        service.tick()
        if service.draining:
            lifecycle.request_stop("drain")
        await asyncio.sleep(TICK_S)


async def _until_idle(service: WorkerService, deadline: float) -> None:
    while not service.idle:
        if asyncio.get_running_loop().time() >= deadline:
            log.warning("drain deadline passed with work left")
            return
        await asyncio.sleep(TICK_S / 4)


async def _say_goodbye(link: ControlLink, incarnation: Incarnation) -> None:
    with suppress(TimeoutError, TransportError):
        async with asyncio.timeout(GOODBYE_S):
            await link.leave(Leaving(incarnation, finished=True))
