"""The life of a worker's process, the same for prefill and decode: register, serve, drain, leave.

A composition root makes a `WorkerProcess` first, builds its engine, service and hand-off half around it, and ends with
`serve`.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Protocol

from service_kit.control_link import ControlHandler, ControlLink, RegistrationRefused
from service_kit.health import Check, serve_health
from service_kit.lifecycle import Lifecycle
from service_kit.worker_metrics import render, worker_registry
from service_kit.worker_settings import WorkerSettings
from service_kit.worker_setup import ServedModel, fault_plan, open_transports, transport_options, worker_id, worker_info
from transport.errors import TransportError
from wire.control import Endpoint, Leaving, Role, WorkerLoad, WorkerMessage
from wire.ids import new_incarnation

log = logging.getLogger(__name__)

TICK_S = 0.1
GOODBYE_S = 1.0

EXIT_OK = 0
EXIT_ENGINE_DEAD = 1
EXIT_WORK_LEFT = 1
EXIT_REFUSED = 3


class WorkerService(ControlHandler, Protocol):
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

    def on_engine_dead(self, error: BaseException) -> None:
        """Nothing that runs here can finish: say so for each."""


class WorkerProcess:
    """Who this worker is, its link to the coordinator, its endpoints, and how it ends."""

    def __init__(self, settings: WorkerSettings, role: Role) -> None:
        self.role = role
        self.worker_id = worker_id(settings, role)
        self.incarnation = new_incarnation()
        self.faults = fault_plan(settings)
        self.transport_options = transport_options(settings)
        self._settings = settings
        self._engine_dead = asyncio.Event()
        self._service: WorkerService | None = None
        self._link: ControlLink | None = None

    def post(self, message: WorkerMessage) -> None:
        """To the coordinator, in order; dropped while none is there."""
        if self._link is not None:
            self._link.post(message)

    def on_engine_dead(self, error: BaseException) -> None:
        """On the event loop: what runs here is told to have failed, and `serve` ends."""
        log.critical("the engine has died", exc_info=error)
        if self._service is not None:
            self._service.on_engine_dead(error)
        self._engine_dead.set()

    async def serve(
        self,
        lifecycle: Lifecycle,
        service: WorkerService,
        model: ServedModel,
        *,
        max_num_sequences: int,
        endpoints: tuple[Endpoint, ...] = (),
        not_ready: Check = lambda: None,
    ) -> int:
        """Serve until told to stop; returns the exit code. The caller starts and stops what the service is made of.

        Args:
            not_ready: what else but the registration keeps this worker from being ready.
        """

        def why_not_ready() -> str | None:
            return not_ready() if link.registered and not service.draining else "not registered, or draining"

        settings = self._settings
        info = worker_info(settings, self.role, self.incarnation, model, max_num_sequences, endpoints)
        async with AsyncExitStack() as stack:
            (transport,) = open_transports(stack, ["zmq"], self.transport_options, self.faults, "control").values()
            link = ControlLink(transport, settings.coordinator, info, settings.cluster_token, service.load, service)
            self._service, self._link = service, link
            await stack.enter_async_context(
                serve_health(
                    settings.http_host,
                    settings.http_port,
                    health=lambda: "the engine has died" if self._engine_dead.is_set() else None,
                    ready=why_not_ready,
                    metrics=partial(render, worker_registry(self.worker_id, self.role, service.load)),
                )
            )
            return await self._until_stopped(lifecycle, service, link)

    async def _until_stopped(self, lifecycle: Lifecycle, service: WorkerService, link: ControlLink) -> int:
        # Before the first registration there is nothing to drain: a stop then cancels this.
        registration = asyncio.create_task(link.run(on_registered=lifecycle.ready), name="control-link")
        ticker = asyncio.create_task(_tick(service, lifecycle), name="ticker")
        stop = asyncio.create_task(lifecycle.stop_requested(), name="stop-requested")
        dead = asyncio.create_task(self._engine_dead.wait(), name="engine-dead")
        tasks = (registration, ticker, stop, dead)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if dead.done():
                await self._say_goodbye(link)
                return EXIT_ENGINE_DEAD
            if registration.done():
                return _registration_ended(registration)
            if ticker.done():
                ticker.result()
            service.begin_drain()
            is_idle = await self._until_idle(service, lifecycle.drain_deadline)
            _log_what_is_left(service.load())
            await self._say_goodbye(link)
            return EXIT_OK if is_idle else EXIT_WORK_LEFT
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError, RegistrationRefused):
                    await task

    async def _until_idle(self, service: WorkerService, deadline: float) -> bool:
        """False: the deadline passed, or the engine died, with work left."""
        while not service.idle or service.load().blocks_held:  # the engine lets go of blocks a moment after the last event
            if self._engine_dead.is_set():
                return False
            if asyncio.get_running_loop().time() >= deadline:
                log.warning("drain deadline passed with work left")
                return False
            await asyncio.sleep(TICK_S / 4)
        return True

    async def _say_goodbye(self, link: ControlLink) -> None:
        with suppress(TimeoutError, TransportError):
            async with asyncio.timeout(GOODBYE_S):
                await link.leave(Leaving(self.incarnation, finished=True))


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


def _log_what_is_left(load: WorkerLoad) -> None:
    """What a worker holds when it goes: all zero, unless the deadline cut its drain short."""
    fields = ("waiting", "running", "reserved", "exporting", "blocks_held")
    log.info("drained", extra={name: getattr(load, name) for name in fields})
