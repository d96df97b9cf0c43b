"""Composition root of a prefill worker."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from functools import partial

import uvloop

from engine.build import EngineShape, build_engine, engine_shape
from prefill_service.decode_link import LinkIdentity
from prefill_service.handoff_client import HandoffClient
from prefill_service.link_manager import LinkManager
from prefill_service.service import PrefillService
from prefill_service.settings import PrefillSettings
from service_kit.control_link import ControlLink
from service_kit.health import serve_health
from service_kit.lifecycle import Lifecycle
from service_kit.process_mark import OwnMark
from service_kit.worker_metrics import render, worker_registry
from service_kit.worker_process import serve_worker
from service_kit.worker_setup import open_transports, require_model_dir, worker_id, worker_info
from transport.memory import AnonymousMemory
from wire.control import Role, WorkerMessage
from wire.ids import new_incarnation

log = logging.getLogger(__name__)

ENGINE_WARM_S = 300.0
ENGINE_STOP_S = 10.0


def run(settings: PrefillSettings) -> int:
    """Serve until stopped; returns the exit code."""
    shape = engine_shape(settings.engine, require_model_dir(settings.worker, Role.PREFILL))
    lifecycle = Lifecycle(settings.process.drain_s)
    return lifecycle.run(partial(_serve, settings, shape), loop_factory=uvloop.new_event_loop)


async def _serve(settings: PrefillSettings, shape: EngineShape, lifecycle: Lifecycle) -> int:
    loop = asyncio.get_running_loop()
    incarnation = new_incarnation()
    name = worker_id(settings.worker, Role.PREFILL)
    engine_dead = asyncio.Event()
    service: PrefillService
    link: ControlLink  # both are made below, before anything can call them

    def post(message: WorkerMessage) -> None:
        link.post(message)

    def on_engine_dead(error: BaseException) -> None:
        log.critical("the engine has died", exc_info=error)
        service.on_engine_dead(error)
        engine_dead.set()

    async with AsyncExitStack() as stack:
        transports = open_transports(stack, settings.worker.transports)
        (control_transport,) = open_transports(stack, ["zmq"]).values()
        pool = AnonymousMemory(shape.pool_bytes).view
        engine = await asyncio.to_thread(
            build_engine,
            settings.engine,
            shape,
            pool,
            lambda events: loop.call_soon_threadsafe(service.on_engine_events, events),
            lambda error: loop.call_soon_threadsafe(on_engine_dead, error),
        )
        service = PrefillService(engine, incarnation, post, time.monotonic)
        client = HandoffClient(pool, shape.layout, service, time.monotonic)
        own_mark = OwnMark()
        stack.callback(own_mark.close)
        identity = LinkIdentity(name, incarnation, shape.fingerprint, own_mark.mark, settings.worker.cluster_token)
        links = LinkManager(identity, transports, client, post, time.monotonic)
        stack.push_async_callback(links.close)
        service.use(client, links)
        info = worker_info(
            settings.worker,
            Role.PREFILL,
            incarnation,
            fingerprint=shape.fingerprint,
            block_size=shape.layout.block_size,
            num_blocks=shape.num_blocks,
            max_model_len=shape.max_model_len,
            vocab_size=shape.model.vocab_size,
            max_num_sequences=settings.engine.max_num_sequences,
        )
        link = ControlLink(
            control_transport, settings.worker.coordinator, info, settings.worker.cluster_token, service.load, service
        )
        engine.start()
        stack.callback(engine.stop, ENGINE_STOP_S)
        await asyncio.to_thread(engine.wait_ready, ENGINE_WARM_S)

        def not_ready() -> str | None:
            """Ready means: a hand-off could be made now."""
            if not link.registered or service.draining:
                return "not registered, or draining"
            return None if links.links else "no proven link to a decode worker"

        await stack.enter_async_context(
            serve_health(
                settings.worker.http_host,
                settings.worker.http_port,
                health=lambda: "the engine has died" if engine_dead.is_set() else None,
                ready=not_ready,
                metrics=partial(render, worker_registry(name, Role.PREFILL, service.load)),
            )
        )
        return await serve_worker(lifecycle, service, link, incarnation, engine_dead)
