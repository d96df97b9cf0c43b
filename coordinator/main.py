"""Composition root of the coordinator."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from functools import partial

import msgspec
import uvloop
from prometheus_client import CollectorRegistry

from coordinator.api.app import create_app
from coordinator.api.settings import ApiSettings
from coordinator.cluster_metrics import ClusterMetrics
from coordinator.control_hub import ControlHub
from coordinator.dispatcher import Dispatcher
from coordinator.grammars import BadGrammar, GrammarChecker
from coordinator.metrics import RequestMetrics
from coordinator.placement_settings import PlacementSettings
from coordinator.settings import CoordinatorSettings
from coordinator.text_model import TextModel
from service_kit.errors import SettingsError
from service_kit.http_server import HttpServer
from service_kit.lifecycle import Lifecycle
from service_kit.worker_setup import open_transports, transport_options
from wire.ids import new_incarnation

log = logging.getLogger(__name__)

HTTP_STOP_S = 2.0


def run(settings: CoordinatorSettings) -> int:
    """Serve until stopped; returns the exit code."""
    if settings.model_dir is None:
        raise SettingsError("model_dir", "coordinator", "is required here: the directory of a converted model")
    template = None if settings.chat_template is None else settings.chat_template.read_text(encoding="utf-8")
    text = TextModel.load(settings.model_dir, settings.served_model or settings.model, chat_template=template)
    lifecycle = Lifecycle(settings.process.drain_s)
    return lifecycle.run(partial(_serve, settings, text), loop_factory=uvloop.new_event_loop)


async def _serve(settings: CoordinatorSettings, text: TextModel, lifecycle: Lifecycle) -> int:
    placement = PlacementSettings(
        policy=settings.policy,
        auto_min_prefill_tokens=settings.auto_min_prefill_tokens,
        max_outstanding=settings.max_outstanding,
        model=text.name,
        cluster_token=settings.cluster_token,
        **msgspec.structs.asdict(settings.failure),
    )
    api = ApiSettings(
        api_keys=settings.api_keys,
        allow_policy_header=settings.allow_policy_header,
        api_keys_file=settings.api_keys_file,
        max_in_flight=settings.max_outstanding,
        max_queued=settings.max_queued,
        requests_per_minute=settings.requests_per_minute,
        request_burst=settings.request_burst,
        request_timeout_s=settings.request_timeout_s,
    )
    grammars = GrammarChecker(text.tokenizer, text.vocab_size, api.grammar_timeout_s)
    try:
        await asyncio.to_thread(grammars.load)
    except BadGrammar as error:
        log.warning("structured output is not available: %s", error)
    async with AsyncExitStack() as stack:
        (transport,) = open_transports(stack, ["zmq"], transport_options(settings)).values()
        dispatcher = Dispatcher(placement, new_incarnation())
        hub = ControlHub(transport, dispatcher)
        registry = CollectorRegistry()
        request_metrics = RequestMetrics(registry)
        ClusterMetrics(
            registry, dispatcher.view, dispatcher.placer.assignments, dispatcher.counters, lambda: dispatcher.outstanding
        )
        app = create_app(
            dispatcher,
            text,
            api,
            dispatcher.cluster,
            request_metrics.exposition,
            request_metrics=request_metrics,
            grammars=grammars,
        )
        control = await hub.listen(settings.control)
        stack.push_async_callback(hub.close)
        dispatcher.start()
        stack.push_async_callback(dispatcher.close)
        server = HttpServer(app, settings.host, settings.port)
        await server.start()
        stack.push_async_callback(server.stop, HTTP_STOP_S)
        log.info("serving %s at %s, workers register at %s", text.name, server.url, control)
        lifecycle.ready()
        await lifecycle.stop_requested()
        drained = await dispatcher.drain(max(0.0, lifecycle.drain_deadline - asyncio.get_running_loop().time()))
        if not drained:
            log.warning("drain deadline passed with requests left")
        return 0 if drained else 1
