"""A worker's own HTTP endpoints: is it alive, can it serve, and its figures.

GET /health     200 while the process does its work, 503 with the reason when it does not
GET /ready      200 when it can take requests
GET /metrics    Prometheus' text format
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from service_kit.http_server import HttpServer

Check = Callable[[], str | None]
"""None = fine, else why not."""

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STOP_S = 1.0


def health_app(health: Check, ready: Check, metrics: Callable[[], bytes]) -> Starlette:
    def answer(check: Check) -> Response:
        reason = check()
        return JSONResponse(
            {"status": "ok"} if reason is None else {"status": "unavailable", "reason": reason},
            200 if reason is None else 503,
        )

    async def get_health(request: Request) -> Response:
        return answer(health)

    async def get_ready(request: Request) -> Response:
        return answer(ready)

    async def get_metrics(request: Request) -> Response:
        return Response(metrics(), media_type=METRICS_TYPE)

    return Starlette(routes=[Route("/health", get_health), Route("/ready", get_ready), Route("/metrics", get_metrics)])


@asynccontextmanager
async def serve_health(
    host: str, port: int | None, *, health: Check, ready: Check, metrics: Callable[[], bytes]
) -> AsyncIterator[HttpServer | None]:
    """Serve them for the length of the block; `port` None serves nothing.

    Raises:
        ListenError: the address cannot be listened on.
    """
    if port is None:
        yield None
        return
    server = HttpServer(health_app(health, ready, metrics), host, port)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(STOP_S)
