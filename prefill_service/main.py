"""Composition root of a prefill worker."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from functools import partial

import uvloop

from engine.build import EngineShape, engine_shape
from engine.kv_packing import BlockPacker, packers_for
from engine.on_loop import build_engine_on_loop, running_engine
from prefill_service.decode_link import LinkIdentity
from prefill_service.handoff_client import HandoffClient
from prefill_service.link_manager import LinkManager
from prefill_service.service import PrefillService
from prefill_service.settings import PrefillSettings
from service_kit.errors import SettingsError
from service_kit.lifecycle import Lifecycle
from service_kit.process_mark import OwnMark
from service_kit.worker_process import WorkerProcess
from service_kit.worker_setup import open_transports, require_model_dir
from transport.memory import AnonymousMemory
from wire.control import Role


def run(settings: PrefillSettings) -> int:
    """Serve until stopped; returns the exit code."""
    shape = engine_shape(settings.engine, require_model_dir(settings.worker, Role.PREFILL))
    lifecycle = Lifecycle(settings.process.drain_s)
    return lifecycle.run(partial(_serve, settings, shape), loop_factory=uvloop.new_event_loop)


async def _serve(settings: PrefillSettings, shape: EngineShape, lifecycle: Lifecycle) -> int:
    worker = WorkerProcess(settings.worker, Role.PREFILL)
    service: PrefillService  # made below: the engine, which reports to it, comes first
    async with AsyncExitStack() as stack:
        transports = open_transports(stack, settings.worker.transport_order, worker.transport_options, worker.faults)
        pool = AnonymousMemory(shape.pool_bytes).view
        engine = await build_engine_on_loop(
            settings.engine, shape, pool, lambda events: service.on_engine_events(events), worker.on_engine_dead
        )
        service = PrefillService(engine, worker.incarnation, worker.post, time.monotonic)
        packer = _packer(settings, shape)
        client = HandoffClient(pool, shape.layout, service, time.monotonic, packer)
        own_mark = OwnMark()
        stack.callback(own_mark.close)
        token = settings.worker.cluster_token
        identity = LinkIdentity(
            worker.worker_id,
            worker.incarnation,
            shape.fingerprint,
            own_mark.mark,
            token,
            packing="" if packer is None else packer.name,
        )
        links = LinkManager(identity, transports, client, worker.post, time.monotonic)
        stack.push_async_callback(links.close)
        service.use(client, links)
        await stack.enter_async_context(running_engine(engine))
        return await worker.serve(
            lifecycle,
            service,
            shape,
            max_num_sequences=settings.engine.max_num_sequences,
            # Ready means: a hand-off could be made now.
            not_ready=lambda: None if links.links else "no proven link to a decode worker",
        )


def _packer(settings: PrefillSettings, shape: EngineShape) -> BlockPacker | None:
    """
    Raises:
        SettingsError: this cache cannot be packed so.
    """
    if settings.kv_wire_dtype == "native":
        return None
    packer = packers_for(shape.layout).get(settings.kv_wire_dtype)
    if packer is None:
        raise SettingsError("kv_wire_dtype", "prefill", f"a cache of {shape.layout.dtype} cannot be packed as numbers")
    return packer
