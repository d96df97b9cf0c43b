"""Composition root of a decode worker."""

from __future__ import annotations

import logging
import time
from contextlib import AsyncExitStack
from functools import partial

import uvloop

from decode_service.handoff_server import HandoffServer
from decode_service.kv_region import KvRegion
from decode_service.service import DecodeService
from decode_service.settings import DecodeSettings
from engine.build import EngineShape, engine_shape
from engine.kv_packing import packers_for
from engine.on_loop import build_engine_on_loop, running_engine
from service_kit.errors import SettingsError
from service_kit.lifecycle import Lifecycle
from service_kit.worker_process import WorkerProcess
from service_kit.worker_setup import open_transports, require_model_dir
from transport.base import Transport
from wire.control import Endpoint, Role

log = logging.getLogger(__name__)

DEFAULT_LISTEN = {"ucx": "ucx://127.0.0.1:0"}
DEFAULT_LISTEN_ELSE = "tcp://127.0.0.1:0"


def run(settings: DecodeSettings) -> int:
    """Serve until stopped; returns the exit code."""
    shape = engine_shape(settings.engine, require_model_dir(settings.worker, Role.DECODE))
    lifecycle = Lifecycle(settings.process.drain_s)
    return lifecycle.run(partial(_serve, settings, shape), loop_factory=uvloop.new_event_loop)


async def _serve(settings: DecodeSettings, shape: EngineShape, lifecycle: Lifecycle) -> int:
    worker = WorkerProcess(settings.worker, Role.DECODE)
    service: DecodeService  # made below: the engine, which reports to it, comes first
    async with AsyncExitStack() as stack:
        transports = open_transports(stack, settings.worker.transport_order, worker.transport_options, worker.faults)
        region = KvRegion(transports, shape.num_blocks, shape.layout.block_bytes)
        stack.callback(region.close)
        engine = await build_engine_on_loop(
            settings.engine, shape, region.pool, lambda events: service.on_engine_events(events), worker.on_engine_dead
        )
        service = DecodeService(engine, shape.layout, worker.incarnation, worker.post, time.monotonic)
        server = HandoffServer(
            region,
            worker_id=worker.worker_id,
            incarnation=worker.incarnation,
            fingerprint=shape.fingerprint,
            token=settings.worker.cluster_token,
            outcome=service,
            clock=time.monotonic,
            packers=packers_for(shape.layout),
        )
        service.use_server(server)
        endpoints = await _listen(stack, settings, transports, server)
        await stack.enter_async_context(running_engine(engine))
        return await worker.serve(
            lifecycle, service, shape, max_num_sequences=settings.engine.max_num_sequences, endpoints=endpoints
        )


async def _listen(
    stack: AsyncExitStack, settings: DecodeSettings, transports: dict[str, Transport], server: HandoffServer
) -> tuple[Endpoint, ...]:
    """One listener per offered transport, in order of preference."""
    wanted = {endpoint.transport: endpoint.address for endpoint in settings.endpoints}
    if unknown := wanted.keys() - transports.keys():
        raise SettingsError("listen", "decode", f"{', '.join(sorted(unknown))}: not among the transports of this worker")
    endpoints: list[Endpoint] = []
    for scheme, transport in transports.items():
        listener = await transport.listen(
            wanted.get(scheme, DEFAULT_LISTEN.get(scheme, DEFAULT_LISTEN_ELSE)), partial(server.serve, scheme)
        )
        stack.push_async_callback(listener.close)
        address = _advertised(listener.address, settings.advertise_host)
        log.info("taking hand-offs over %s at %s", scheme, address)
        endpoints.append(Endpoint(scheme, address))
    return tuple(endpoints)


def _advertised(address: str, host: str) -> str:
    scheme, separator, place = address.partition("://")
    if not host or scheme not in ("tcp", "ucx"):
        return address
    return f"{scheme}{separator}{host}:{place.rpartition(':')[2]}"
