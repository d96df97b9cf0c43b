"""Serves an ASGI application on one address, inside a process that has a lifecycle of its own.

uvicorn's server installs signal handlers and runs until it gets one; here it is started and stopped by whoever owns it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import uvicorn

from service_kit.errors import ListenError, StartError

AsgiApp = Callable[
    [
        MutableMapping[str, Any],
        Callable[[], Awaitable[MutableMapping[str, Any]]],
        Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ],
    Awaitable[None],
]

BACKLOG = 2048
START_S = 30.0
"""How long the application's own start (its lifespan) may take."""
FORCE_GRACE_S = 1.0


class HttpServer:
    """`start`, then `stop`; both once."""

    def __init__(self, app: AsgiApp, host: str, port: int) -> None:
        """
        Args:
            port: 0 = any free one, see `address`.
        """
        self._app = app
        self._host = host
        self._port = port
        self._socket: socket.socket | None = None
        self._address: tuple[str, int] | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that are, or were, listened on; only after `start`."""
        if self._address is None:
            raise RuntimeError("the server is not started")
        return self._address

    @property
    def url(self) -> str:
        host, port = self.address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self) -> None:
        """Listen and accept requests.

        Raises:
            ListenError: the address is in use or not one of this host's.
            StartError: the application did not start up.
        """
        self._socket = _listen(self._host, self._port)
        self._address = self._socket.getsockname()[:2]
        config = uvicorn.Config(
            self._app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="auto",
            timeout_keep_alive=75,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(_serve(self._server, self._socket), name="http server")
        deadline = asyncio.get_running_loop().time() + START_S
        try:
            while not self._server.started:
                if self._serving.done():
                    self._serving.result()
                    raise StartError("the server ended while it started")
                if asyncio.get_running_loop().time() > deadline:
                    raise StartError(f"the application did not start up within {START_S} s")
                await asyncio.sleep(0.005)
        except BaseException:
            await self.stop(0.0)
            raise

    async def stop(self, deadline_s: float) -> None:
        """Take no new connection, let requests end for `deadline_s` seconds, then end them; idempotent."""
        if self._server is None or self._serving is None or self._socket is None:
            return
        server, serving, listening = self._server, self._serving, self._socket
        self._server = self._serving = None
        server.config.timeout_graceful_shutdown = max(0.0, deadline_s)  # type: ignore[assignment]  # passed to wait_for as is
        server.should_exit = True
        done, _ = await asyncio.wait([serving], timeout=deadline_s + FORCE_GRACE_S)
        if not done:
            server.force_exit = True
            serving.cancel()
            await asyncio.wait([serving], timeout=FORCE_GRACE_S)
        listening.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the lifecycle's."""
        yield


async def _serve(server: _Server, listening: socket.socket) -> None:
    try:
        await server.serve(sockets=[listening])
    except SystemExit as error:  # uvicorn's way to say that the lifespan failed
        raise StartError("the application failed to start up") from error


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        raise ListenError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return listening
