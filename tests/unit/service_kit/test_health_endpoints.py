from __future__ import annotations

import asyncio

import httpx
import pytest

from service_kit.errors import ListenError, StartError
from service_kit.health import serve_health
from service_kit.http_server import HttpServer
from service_kit.worker_metrics import WORKER_METRICS, render, worker_registry
from wire.control import Role, WorkerLoad
from wire.ids import WorkerId


async def test_a_worker_answers_for_its_health_readiness_and_figures() -> None:
    reasons: dict[str, str | None] = {"health": None, "ready": "warming up"}
    load = WorkerLoad(running=3, decode_tokens=41)
    registry = worker_registry(WorkerId("decode-0"), Role.DECODE, lambda: load)
    async with serve_health(
        "127.0.0.1",
        0,
        health=lambda: reasons["health"],
        ready=lambda: reasons["ready"],
        metrics=lambda: render(registry),
    ) as server:
        assert server is not None
        async with httpx.AsyncClient(base_url=server.url) as client:
            # 1. Alive, not ready.
            assert (await client.get("/health")).status_code == 200
            answer = await client.get("/ready")
            assert (answer.status_code, answer.json()["reason"]) == (503, "warming up")
            # 2. Ready; then ill.
            reasons |= {"ready": None, "health": "the engine thread died"}
            assert (await client.get("/ready")).status_code == 200
            assert (await client.get("/health")).status_code == 503
            # 3. Figures are those of the moment.
            text = (await client.get("/metrics")).text
            assert 'kvrelay_running_sequences{role="decode",worker="decode-0"} 3.0' in text
            assert 'kvrelay_decode_tokens_total{role="decode",worker="decode-0"} 41.0' in text
    # 4. The port is free again.
    again = HttpServer(lambda scope, receive, send: asyncio.sleep(0), *server.address)
    await again.start()
    await again.stop(0.0)


async def test_without_a_port_nothing_is_served() -> None:
    async with serve_health("127.0.0.1", None, health=lambda: None, ready=lambda: None, metrics=lambda: b"") as server:
        assert server is None


def test_every_figure_of_a_load_is_exported() -> None:
    assert sorted(metric.field for metric in WORKER_METRICS) == sorted(WorkerLoad.__struct_fields__)
    assert len({metric.name for metric in WORKER_METRICS}) == len(WORKER_METRICS)


async def slow_app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await asyncio.sleep(float(scope["path"][1:]))
    await send({"type": "http.response.body", "body": b"done"})


async def test_a_stop_lets_requests_end_until_its_deadline() -> None:
    for seconds, deadline_s, finishes in [(0.3, 5.0, True), (30.0, 0.2, False)]:
        server = HttpServer(slow_app, "127.0.0.1", 0)
        await server.start()
        url = f"{server.url}/{seconds}"
        async with httpx.AsyncClient() as client:
            request = asyncio.create_task(client.get(url))
            await asyncio.sleep(0.1)
            begin = asyncio.get_running_loop().time()
            await server.stop(deadline_s)
            assert asyncio.get_running_loop().time() - begin < 2.0
            if finishes:
                assert (await request).text == "done"
            else:
                with pytest.raises(httpx.HTTPError):
                    await request
        await server.stop(0.0)


async def test_an_address_in_use_is_refused_by_name() -> None:
    server = HttpServer(slow_app, "127.0.0.1", 0)
    await server.start()
    with pytest.raises(ListenError, match=str(server.address[1])):
        await HttpServer(slow_app, "127.0.0.1", server.address[1]).start()
    await server.stop(0.0)


async def test_an_application_that_fails_to_start_is_an_error() -> None:
    async def failing(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no"})

    with pytest.raises(StartError):
        await HttpServer(failing, "127.0.0.1", 0).start()
