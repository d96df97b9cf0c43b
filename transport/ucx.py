"""UCX through ucxx, the one file that knows it: contexts, and lanes that carry tagged bytes between two of them.

A lane is a UCX worker with one endpoint, made for one channel and one direction, so that closing it ends everything that
was ever posted on it: **after `Lane.close` no byte is received any more**, into whatever memory. Receives are posted on
the worker and not on the endpoint (ucxx 0.52 never frees a worker whose endpoint had a receive that was cut).

Endpoints have UCX's error handling. UCX then leaves shared memory and CMA alone and uses RDMA or TCP, also within a host.
Without it, a peer that dies while the other side reads from it by CMA aborts the reading process (cma_ep.c, "fatal"), and
closing an endpoint waits for the peer, however long that is stopped. Within a host there is `shm`.

Progress is made on the event loop: while requests are open it looks again in each turn of the loop, for `_SPIN_S` since
anything happened, and otherwise waits for UCX's file descriptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from transport.errors import TransportError
from transport.ucx_query import transports_of

_SPIN_S = 0.0005
_TURN_S = 0.001  # how long one turn of the loop may make progress before others run
_CLOSE_PERIOD_NS = 10_000_000
_CLOSE_STEPS = 1000
_SEGMENT_BYTES = 256 << 10  # UCX's own of 8 KiB cost a system call each
_SOCKET_BUFFER_BYTES = 4 << 20

Done = Callable[[str | None], None]
"""Called once when a request has ended; with what went wrong, or None."""


def is_installed() -> bool:
    return importlib.util.find_spec("ucxx") is not None


def _config() -> dict[str, str]:
    """What makes UCX's TCP three times as fast. Socket buffers stay the kernel's where it would not grant as much."""
    config = {"TCP_TX_SEG_SIZE": str(_SEGMENT_BYTES), "TCP_RX_SEG_SIZE": str(_SEGMENT_BYTES)}
    for key, limit in (("TCP_SNDBUF", "wmem_max"), ("TCP_RCVBUF", "rmem_max")):
        try:
            granted = int(Path(f"/proc/sys/net/core/{limit}").read_text())
        except (OSError, ValueError):
            continue
        if granted >= _SOCKET_BUFFER_BYTES:
            config[key] = str(_SOCKET_BUFFER_BYTES)
    return {key: value for key, value in config.items() if f"UCX_{key}" not in os.environ}


def _load() -> tuple[ModuleType, type[Any]]:
    """
    Raises:
        TransportError: ucxx is not there, or does not load.
    """
    # ucxx sets a variable that its own UCX does not know, and UCX would say so on every start.
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    try:
        import ucxx._lib.libucxx as api
        from ucxx._lib.arr import Array
    except (ImportError, OSError) as error:
        raise TransportError(f"the ucx transport needs ucxx (pip install 'kvrelay[ucx]'): {error}") from error
    return api, Array


class UcxContext:
    """UCX of one transport. Settings of the environment (UCX_TLS, UCX_NET_DEVICES, …) come before ours."""

    def __init__(self) -> None:
        """
        Raises:
            TransportError: UCX cannot be used here.
        """
        self.api, self.array = _load()
        self.handle: Any
        self._lanes: set[Lane] = set()
        self._empty: asyncio.Event | None = None
        try:
            self.handle = self.api.UCXContext(_config(), (self.api.Feature.TAG, self.api.Feature.WAKEUP))
        except self.api.UCXError as error:
            raise TransportError(f"UCX does not start: {error}") from error

    @property
    def version(self) -> tuple[int, int]:
        """Two of the same understand each other."""
        major, minor, *_ = self.api.get_ucx_version()
        return int(major), int(minor)

    def track(self, lane: Lane) -> Callable[[], None]:
        """Keeps a lane in mind until what is returned is called."""
        self._lanes.add(lane)

        def forget() -> None:
            self._lanes.discard(lane)
            if not self._lanes and self._empty is not None:
                self._empty.set()

        return forget

    async def close(self, within_s: float) -> None:
        """Waits for lanes that have retired, as long as given, and closes those that are left."""
        self._empty = asyncio.Event()
        if self._lanes:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), within_s)
        for lane in list(self._lanes):
            lane.close()
        self.handle = None


class Lane:
    """Carries tagged bytes to and from one peer, on the running event loop.

    Args:
        on_broken: called once, from the loop, when UCX says that the connection has failed.
    """

    def __init__(self, context: UcxContext, on_broken: Callable[[str], None]) -> None:
        """
        Raises:
            TransportError: UCX has no worker left to give.
        """
        self._api, self._array = context.api, context.array
        self._on_broken: Callable[[str], None] | None = on_broken
        self._loop = asyncio.get_running_loop()
        try:
            self._worker = self._api.UCXWorker(context.handle)
            self._worker.init_blocking_progress_mode()
        except self._api.UCXError as error:
            raise TransportError(f"UCX gives no worker: {error}") from error
        self._endpoint: Any = None
        self._requests: list[tuple[Any, Done]] = []
        self._fd = self._worker.epoll_file_descriptor
        self._next_turn: asyncio.Handle | None = None
        self._retired: asyncio.TimerHandle | None = None
        self._busy_until = 0.0
        self._on_closed = context.track(self)
        self._loop.add_reader(self._fd, self._turn)
        self._wake()

    @property
    def closed(self) -> bool:
        return self._worker is None

    @property
    def address(self) -> bytes:
        """What the peer connects to; a few hundred bytes."""
        return bytes(self._worker.address.tobytes())

    def connect(self, address: bytes) -> None:
        """
        Raises:
            TransportError: not an address, or UCX does not reach it.
        """
        try:
            wanted = self._api.UCXAddress.create_from_buffer(address)
            self._endpoint = self._api.UCXEndpoint.create_from_worker_address(self._worker, wanted, True)
        except (self._api.UCXError, ValueError, RuntimeError) as error:
            raise TransportError(f"UCX does not reach the peer: {error or type(error).__name__}") from error
        self._wake()

    @property
    def transports(self) -> tuple[str, ...]:
        """What UCX has chosen for this lane, such as `tcp/eth0`."""
        return () if self._endpoint is None else transports_of(self._endpoint.handle)

    def send(self, tag: int, source: memoryview, done: Done) -> None:
        """The bytes are lent until `done`."""
        self._start(lambda: self._endpoint.tag_send(self._array(source), self._api.UCXXTag(tag)), done)

    def receive(self, tag: int, target: memoryview, done: Done) -> None:
        """The memory belongs to UCX until `done`, or until the lane is closed."""
        self._start(lambda: self._worker.tag_recv(self._array(target), self._api.UCXXTag(tag)), done)

    def close(self) -> None:
        """Ends every request; its `done` is not called any more. Nothing is received or read after this."""
        if self.closed:
            return
        self._on_broken = None
        self._loop.remove_reader(self._fd)
        for timer in (self._next_turn, self._retired):
            if timer is not None:
                timer.cancel()
        self._next_turn = self._retired = None
        if self._endpoint is not None:
            self._endpoint.close_blocking(_CLOSE_PERIOD_NS, 1)
        self._worker.cancel_inflight_requests()
        for _ in range(_CLOSE_STEPS):
            if all(request.completed for request, _ in self._requests):
                break
            self._worker.progress_once()
        # A worker that nobody drives any more moves nothing, even where a request of it is still open.
        self._requests.clear()
        self._endpoint = None
        self._worker = None
        self._on_closed()

    def retire(self, within_s: float) -> None:
        """Closes when nothing is open any more, as when the peer has closed its end; at the latest in `within_s`.

        For lanes that send: ucxx 0.52 never frees a worker whose sends were cut from this side. No `done` is called any
        more.
        """
        if self.closed:
            return
        self._on_broken = None
        self._requests = [(request, _ignore) for request, _ in self._requests]
        self._retired = self._loop.call_later(within_s, self.close)
        self._wake()

    def _start(self, begin: Callable[[], Any], done: Done) -> None:
        try:
            self._requests.append((begin(), done))
        except self._api.UCXError as error:
            reason = str(error)
            self._loop.call_soon(done, reason)
            self._broken(reason)
            return
        self._busy_until = time.monotonic() + _SPIN_S
        self._wake()

    def _wake(self) -> None:
        if self._next_turn is None:
            self._next_turn = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn = None
        now = time.monotonic()
        end = now + _TURN_S
        while self._worker.progress_once():
            now = time.monotonic()
            self._busy_until = now + _SPIN_S
            if now >= end:
                break
        self._finish()
        if self.closed:
            return
        if self._retired is not None and not self._requests:
            self.close()
            return
        if self._endpoint is not None and not self._endpoint.alive:
            self._broken("the connection was lost")
        spinning = bool(self._requests) and now < self._busy_until
        if spinning or not self._worker.arm():
            self._wake()

    def _finish(self) -> None:
        """Tells of requests that have ended. What is called may start others, or close the lane."""
        ended = [(request, done) for request, done in self._requests if request.completed]
        if not ended:
            return
        self._requests = [(request, done) for request, done in self._requests if not request.completed]
        while ended and not self.closed:
            request, done = ended.pop(0)
            try:
                request.check_error()
            except self._api.UCXError as error:
                done(str(error))
                self._broken(str(error))
            else:
                done(None)

    def _broken(self, reason: str) -> None:
        tell, self._on_broken = self._on_broken, None
        if tell is not None:
            self._loop.call_soon(tell, reason)


def _ignore(_error: str | None) -> None:
    """For who does not ask any more."""
