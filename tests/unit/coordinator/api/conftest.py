from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from api_client import Door
from prometheus_client import CollectorRegistry
from scripted_generator import ScriptedGenerator
from tiny_model import write_model

from coordinator.api.app import create_app
from coordinator.api.settings import ApiSettings
from coordinator.metrics import RequestMetrics
from coordinator.text_model import TextModel


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(write_model(tmp_path_factory.mktemp("model")), name="tiny")


@pytest.fixture
def door(text: TextModel) -> Callable[..., Door]:
    """`door(generator, **settings)`: the front door as an ASGI app with a client."""

    def make(generator: ScriptedGenerator | None = None, model: TextModel | None = None, **settings: Any) -> Door:
        script = generator if generator is not None else ScriptedGenerator()
        metrics = RequestMetrics(CollectorRegistry())
        app = create_app(
            script,
            model if model is not None else text,
            ApiSettings(**settings),
            lambda: {"workers": []},
            request_metrics=metrics,
        )
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=True), base_url="http://door")
        return Door(app, script, client, metrics)

    return make


@pytest.fixture
def served() -> Callable[[Door], AbstractAsyncContextManager[str]]:
    """`async with served(door) as base_url`: the same app behind a real server on a loopback port."""

    @asynccontextmanager
    async def serve(door: Door) -> AsyncIterator[str]:
        config = uvicorn.Config(door.app, host="127.0.0.1", port=0, ws="none", lifespan="off", log_level="error")
        server = uvicorn.Server(config)
        task = asyncio.create_task(server._serve())  # `serve` would take over the process's signals
        while not server.started:
            await asyncio.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = True
            server.force_exit = True
            await asyncio.wait_for(task, 5)

    return serve
