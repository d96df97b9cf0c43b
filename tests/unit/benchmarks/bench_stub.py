"""A server in this process whose answers come at planned moments: what a client must measure is known exactly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web


@dataclass
class Stub:
    """
    Args:
        token_s: how long before each token, from the one before or from the request's arrival.
        fails: whether the n-th request (from 0) is refused with a 503.
    """

    token_s: Callable[[int], list[float]]
    fails: Callable[[int], bool] = lambda number: False
    breaks: Callable[[int], bool] = lambda number: False  # the connection ends in the middle
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    disconnected: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        if self.fails(number):
            return web.json_response({"error": {"message": "no room"}}, status=503)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        delays = self.token_s(number)[: body["max_tokens"]]
        due = asyncio.get_running_loop().time()
        try:
            for index, delay in enumerate(delays):
                due += delay
                await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
                if self.breaks(number) and index == 1:
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                await self._send(response, {"choices": [{"index": 0, "text": " word", "finish_reason": None}]})
        except (ConnectionError, asyncio.CancelledError):
            self.disconnected += 1
            raise
        await self._send(response, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        usage = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": len(delays)}
        await self._send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    @staticmethod
    async def _send(response: web.StreamResponse, chunk: dict[str, Any]) -> None:
        await response.write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")


async def _models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "stub"}]})


@asynccontextmanager
async def served(stub: Stub) -> AsyncIterator[Stub]:
    app = web.Application()
    app.router.add_post("/v1/completions", stub.answer)
    app.router.add_get("/v1/models", _models)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        stub.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
        yield stub
    finally:
        await runner.cleanup()
