"""Composition root of a decode worker."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from functools import partial

import uvloop

from decode_service.handoff_server import HandoffServer
from decode_service.kv_region import KvRegion
from decode_service.service import DecodeService
from decode_service.settings import DecodeSettings
from engine.build import EngineShape, build_engine, engine_shape
from service_kit.control_link import ControlLink
from service_kit.errors import SettingsError
from service_kit.health import serve_health
from service_kit.lifecycle import Lifecycle
from service_kit.worker_metrics import render, worker_registry
from service_kit.worker_process import serve_worker
from service_kit.worker_setup import open_transports, require_model_dir, worker_id, worker_info
from transport.base import Transport
from wire.control import Endpoint, Role, WorkerMessage
from wire.ids import new_incarnation

log = logging.getLogger(__name__)

DEFAULT_LISTEN = "tcp://127.0.0.1:0"
ENGINE_WARM_S = 300.0
ENGINE_STOP_S = 10.0


def run(settings: DecodeSettings) -> int:
    """Serve until stopped; returns the exit code."""
    shape = engine_shape(settings.engine, require_model_dir(settings.worker, Role.DECODE))
    lifecycle = Lifecycle(settings.process.drain_s)
    return lifecycle.run(partial(_serve, settings, shape), loop_factory=uvloop.new_event_loop)


async def _serve(settings: DecodeSettings, shape: EngineShape, lifecycle: Lifecycle) -> int:
    loop = asyncio.get_running_loop()
    incarnation = new_incarnation()
    name = worker_id(settings.worker, Role.DECODE)
    engine_dead = asyncio.Event()
    service: DecodeService
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
        region = KvRegion(transports, shape.num_blocks, shape.layout.block_bytes)
        stack.callback(region.close)
        engine = await asyncio.to_thread(
            build_engine,
            settings.engine,
            shape,
            region.pool,
            lambda events: loop.call_soon_threadsafe(service.on_engine_events, events),
            lambda error: loop.call_soon_threadsafe(on_engine_dead, error),
        )
        service = DecodeService(engine, shape.layout, incarnation, post, time.monotonic)
        server = HandoffServer(
            region,
            worker_id=name,
            incarnation=incarnation,
            fingerprint=shape.fingerprint,
            token=settings.worker.cluster_token,
            outcome=service,
            clock=time.monotonic,
        )
        service.use_server(server)
        endpoints = await _listen(stack, settings, transports, server)
        info = worker_info(
            settings.worker,
            Role.DECODE,
            incarnation,
            fingerprint=shape.fingerprint,
            block_size=shape.layout.block_size,
            num_blocks=shape.num_blocks,
            max_model_len=shape.max_model_len,
            vocab_size=shape.model.vocab_size,
            max_num_sequences=settings.engine.max_num_sequences,
            endpoints=endpoints,
        )
        link = ControlLink(
            control_transport, settings.worker.coordinator, info, settings.worker.cluster_token, service.load, service
        )
        engine.start()
        stack.callback(engine.stop, ENGINE_STOP_S)
        await asyncio.to_thread(engine.wait_ready, ENGINE_WARM_S)
        await stack.enter_async_context(
            serve_health(
                settings.worker.http_host,
                settings.worker.http_port,
                health=lambda: "the engine has died" if engine_dead.is_set() else None,
                ready=lambda: None if link.registered and not service.draining else "not registered, or draining",
                metrics=partial(render, worker_registry(name, Role.DECODE, service.load)),
            )
        )
        return await serve_worker(lifecycle, service, link, incarnation, engine_dead)


async def _listen(
    stack: AsyncExitStack, settings: DecodeSettings, transports: dict[str, Transport], server: HandoffServer
) -> tuple[Endpoint, ...]:
    """One listener per offered transport, in order of preference."""
    wanted = {endpoint.transport: endpoint.address for endpoint in settings.endpoints}
    if unknown := wanted.keys() - transports.keys():
        raise SettingsError("listen", "decode", f"{', '.join(sorted(unknown))}: not among the transports of this worker")
    endpoints: list[Endpoint] = []
    for scheme, transport in transports.items():
        listener = await transport.listen(wanted.get(scheme, DEFAULT_LISTEN), partial(server.serve, scheme))
        stack.push_async_callback(listener.close)
        address = _advertised(listener.address, settings.advertise_host)
        log.info("taking hand-offs over %s at %s", scheme, address)
        endpoints.append(Endpoint(scheme, address))
    return tuple(endpoints)


def _advertised(address: str, host: str) -> str:
    if not host or not address.startswith("tcp://"):
        return address
    return f"tcp://{host}:{address.rpartition(':')[2]}"
