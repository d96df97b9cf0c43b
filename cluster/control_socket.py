"""How `kvrelay scale` talks to a running `kvrelay up`: JSON lines over a unix socket that only the same user can reach.

One request a connection; any number of `Progress` lines come back, then one `Done` or `Failed`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from cluster.errors import ClusterError, ClusterNotFound

REQUEST_S = 10.0
"""How long a client may take to send its request."""
CONNECT_S = 5.0


class ScaleRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="scale"):
    """Wanted numbers of workers; None = as many as there are."""

    prefill: int | None = None
    decode: int | None = None
    deadline_s: float = 120.0


class Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="progress"):
    text: str


class Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="done"):
    text: str


class Failed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="failed"):
    reason: str


Reply = Progress | Done | Failed
Handler = Callable[[ScaleRequest, Callable[[str], None]], Awaitable[Done | Failed]]


@asynccontextmanager
async def serve_control(path: Path, handler: Handler) -> AsyncIterator[None]:
    """Answer requests for the length of the block, each with `handler(request, report)`."""
    connections: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if _peer_uid(writer) != os.getuid():
                return
            line = await asyncio.wait_for(reader.readline(), REQUEST_S)
            try:
                request = msgspec.json.decode(line, type=ScaleRequest)
            except msgspec.DecodeError as error:
                _write(writer, Failed(f"not a request: {error}"))
            else:
                _write(writer, await handler(request, lambda text: _write(writer, Progress(text))))
            await asyncio.wait_for(writer.drain(), REQUEST_S)
        except (ConnectionError, TimeoutError):
            pass  # the client is gone; what it asked for goes on
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(answer(reader, writer))
        connections.add(task)
        task.add_done_callback(connections.discard)

    server = await asyncio.start_unix_server(accept, path=str(path))
    try:
        yield
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        path.unlink(missing_ok=True)  # noqa: ASYNC240


async def ask(path: Path, request: ScaleRequest, on_progress: Callable[[str], None]) -> Done:
    """Send a request and wait for its end.

    Raises:
        ClusterNotFound: nobody listens.
        ClusterError: the request failed, the cluster ended meanwhile, or gave no answer in time.
    """
    deadline = asyncio.get_running_loop().time() + request.deadline_s + CONNECT_S
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_unix_connection(str(path))
    except (OSError, TimeoutError) as error:
        raise ClusterNotFound(f"the cluster does not answer on {path}: {error}") from error
    try:
        async with asyncio.timeout_at(deadline):
            writer.write(msgspec.json.encode(request) + b"\n")
            while line := await reader.readline():
                reply: Reply = msgspec.json.decode(line, type=Reply)
                if isinstance(reply, Done):
                    return reply
                if isinstance(reply, Failed):
                    raise ClusterError(reply.reason)
                on_progress(reply.text)
    except (OSError, TimeoutError, msgspec.DecodeError) as error:
        raise ClusterError(f"the cluster gave no answer within {request.deadline_s:g} s") from error
    finally:
        writer.close()
    raise ClusterError("the cluster ended before it was done")


def _write(writer: asyncio.StreamWriter, reply: Reply) -> None:
    if not writer.is_closing():
        writer.write(msgspec.json.encode(reply) + b"\n")


def _peer_uid(writer: asyncio.StreamWriter) -> int:
    connection: socket.socket = writer.get_extra_info("socket")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)
