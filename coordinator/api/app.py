"""Puts the front door together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from coordinator.api.admission import Admission
from coordinator.api.errors import install_error_handlers
from coordinator.api.front import FrontLayer
from coordinator.api.generate import GenerateRoutes
from coordinator.api.health import HealthRoutes
from coordinator.api.models import ModelRoutes
from coordinator.api.openapi import install_openapi
from coordinator.api.request_builder import RequestBuilder
from coordinator.api.settings import ApiSettings
from coordinator.api.tokenize import TokenizeRoutes
from coordinator.api_keys import KeyRing
from coordinator.generation import Generator
from coordinator.grammars import GrammarChecker
from coordinator.metrics import RequestMetrics
from coordinator.rate_limit import RateLimit
from coordinator.text_model import TextModel


def create_app(
    generator: Generator,
    text: TextModel,
    settings: ApiSettings,
    cluster: Callable[[], dict[str, Any]],
    metrics: Callable[[], bytes] | None = None,
    *,
    request_metrics: RequestMetrics | None = None,
    grammars: GrammarChecker | None = None,
    is_healthy: Callable[[], bool] = lambda: True,
    clock: Callable[[], float] = time.monotonic,
    unix_time: Callable[[], float] = time.time,
) -> FastAPI:
    """
    Args:
        cluster: what /cluster answers; JSON types only.
        metrics: what /metrics answers; `request_metrics` alone by default. To have both, share one registry.
        request_metrics: where the front door counts; one with a registry of its own by default.
        grammars: what compiles schemas and grammars; one that loads with the first of them by default.
        is_healthy: whether the coordinator itself holds together; /health says so.
        clock: monotonic seconds, for everything that is measured.
        unix_time: only for the `created` fields that OpenAI's answers have.
    """
    counted = request_metrics if request_metrics is not None else RequestMetrics(CollectorRegistry())
    model_name = settings.served_model_name if settings.served_model_name is not None else text.name
    builder = RequestBuilder(text, settings, lambda: generator.max_model_len)
    generate = GenerateRoutes(
        generator=generator,
        text=text,
        settings=settings,
        builder=builder,
        grammars=grammars or GrammarChecker(text.tokenizer, text.vocab_size, settings.grammar_timeout_s),
        metrics=counted,
        admission=Admission(
            settings.max_in_flight,
            settings.max_queued,
            RateLimit(settings.requests_per_minute, settings.request_burst),
            settings.retry_after_s,
        ),
        model_name=model_name,
        clock=clock,
        unix_time=unix_time,
    )
    models = ModelRoutes(model_name, int(unix_time()), builder)
    tokenize = TokenizeRoutes(text, builder, settings, model_name)
    health = HealthRoutes(
        is_healthy, generator.ready, cluster, metrics if metrics is not None else counted.exposition, settings.retry_after_s
    )

    app = FastAPI(title="kvrelay", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_api_route("/v1/completions", generate.completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", generate.chat_completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", models.list_models, methods=["GET"], response_model=None)
    app.add_api_route("/v1/models/{model_id:path}", models.one_model, methods=["GET"], response_model=None)
    app.add_api_route("/tokenize", tokenize.tokenize, methods=["POST"], response_model=None)
    app.add_api_route("/detokenize", tokenize.detokenize, methods=["POST"], response_model=None)
    app.add_api_route("/health", health.health, methods=["GET"], response_model=None)
    app.add_api_route("/ready", health.ready, methods=["GET"], response_model=None)
    app.add_api_route("/metrics", health.metrics, methods=["GET"], response_model=None)
    app.add_api_route("/cluster", health.cluster, methods=["GET"], response_model=None)
    install_error_handlers(app)
    install_openapi(app, model_name, text.vocab_size, settings.max_choices)
    keys = KeyRing(settings.api_keys, settings.api_keys_file, clock)
    app.add_middleware(FrontLayer, settings=settings, keys=keys, metrics=counted, clock=clock)
    return app
