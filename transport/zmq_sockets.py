"""ZeroMQ sockets on the running event loop, without futures that a cancelled task could drop a message with.

`zmq.asyncio` hands a received message to a future; a reader that is cancelled in that moment loses it. Here a callback takes
messages off the socket as they come, and whoever waits is woken by the channel.

What libzmq 4.3.5 must not be asked to do, since its answer is to abort the process (docs/adr, and a contract test):
- receive multipart messages. A connection that ends takes its pipe along, also half-way through a message: with IMMEDIATE
  the socket terminates the pipe that it is reading (`!_more`, fq.cpp), and with three connections another one's end moves
  the place it is reading from. So every frame is a message of its own.
- send heartbeats. Their timer writes to an engine whose connection has ended and whose input had stopped at RCVHWM or at a
  closing socket (`!_io_error`, stream_engine_base.cpp). Channels have heartbeats of their own.
- reconnect a pipe whose input had stopped (`_input_stopped`, ibid.). With IMMEDIATE every connection has a pipe of its own.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

from transport.buffers import SLICE_BYTES
from transport.flow import ITEM_OVERHEAD_BYTES
from transport.options import MAX_HEADER_BYTES, TransportOptions

_TURN_S = 0.001  # how long one turn of the loop may take frames before others run
_LARGE_BYTES = 64 << 10  # pyzmq's own border between copying and lending a buffer
_IPC_BUFFER_BYTES = 4 << 20
_UNCREDITED_MESSAGES = 4096  # pulses, answers and questions, which take no credit

Part = bytes | memoryview
OnFrames = Callable[[list[zmq.Frame]], None]
"""One frame from a DEALER; from a ROUTER the routing id and one frame. Peers that break this rule send more."""


class LinkLost(Exception):
    """Nothing connects to the peer any more. Stays inside this package; channels end with it."""


class Link(Protocol):
    """Frames to one peer."""

    def send(self, head: bytes, tail: Sequence[Part] = ()) -> list[zmq.MessageTracker]:
        """Hands frames to ZeroMQ without waiting. Large ones are lent until their trackers are done.

        Raises:
            LinkLost: the connection is gone.
        """
        ...

    def close(self, linger_ms: int) -> None: ...


class FrameSocket:
    """A non-blocking socket whose messages go to a callback, in order, in turns of about a millisecond."""

    def __init__(self, socket: zmq.Socket[bytes], on_frames: OnFrames) -> None:
        self._socket = socket
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._fd: int = socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._next_turn: asyncio.Handle | None = None
        self._loop.add_reader(self._fd, self._take_turn)
        self._schedule()

    @property
    def closed(self) -> bool:
        return self._socket.closed

    def send(self, head: bytes, tail: Sequence[Part] = (), routing_id: bytes | None = None) -> list[zmq.MessageTracker]:
        """
        Raises:
            LinkLost: no connection takes a frame.
        """
        trackers: list[zmq.MessageTracker] = []
        try:
            for part in (head, *tail):
                lend = len(part) >= _LARGE_BYTES
                frame = zmq.Frame(part, track=lend, copy=not lend)
                if isinstance(frame.tracker, zmq.MessageTracker):
                    trackers.append(frame.tracker)
                if routing_id is not None:
                    self._socket.send(routing_id, zmq.NOBLOCK | zmq.SNDMORE)
                self._socket.send(frame, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            raise LinkLost(str(error)) from error
        # Sending runs ZeroMQ's internal commands, which may swallow the edge that announces messages.
        if self._next_turn is None and self._readable():
            self._schedule()
        return trackers

    def close(self, linger_ms: int) -> None:
        if self._socket.closed:
            return
        self._loop.remove_reader(self._fd)
        if self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn = None
        self._socket.close(linger_ms)

    def _readable(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _schedule(self) -> None:
        self._next_turn = self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        if self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn = None
        end = self._loop.time() + _TURN_S
        try:
            while not self._socket.closed:
                try:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    return
                self._on_frames(frames)
                if self._loop.time() >= end:
                    return
        finally:
            if not self._socket.closed and self._next_turn is None and self._readable():
                self._schedule()


class DealerLink:
    """The dialer's link: a socket of its own."""

    def __init__(self, socket: zmq.Socket[bytes], on_frames: OnFrames) -> None:
        self._socket = FrameSocket(socket, on_frames)

    def send(self, head: bytes, tail: Sequence[Part] = ()) -> list[zmq.MessageTracker]:
        if self._socket.closed:
            raise LinkLost("the socket is closed")
        return self._socket.send(head, tail)

    def close(self, linger_ms: int) -> None:
        self._socket.close(linger_ms)


class RouterLink:
    """The acceptor's link: one peer of the listener's shared socket."""

    def __init__(self, socket: FrameSocket, routing_id: bytes, on_close: Callable[[bytes], None]) -> None:
        self._socket = socket
        self._routing_id = routing_id
        self._on_close = on_close

    def send(self, head: bytes, tail: Sequence[Part] = ()) -> list[zmq.MessageTracker]:
        if self._socket.closed:
            raise LinkLost("the listener is closed")
        return self._socket.send(head, tail, self._routing_id)

    def close(self, linger_ms: int) -> None:
        self._on_close(self._routing_id)


def make_dealer(context: zmq.Context[zmq.Socket[bytes]], options: TransportOptions, on_tcp: bool) -> zmq.Socket[bytes]:
    """Encrypted on TCP, where options have the server's key."""
    socket = context.socket(zmq.DEALER)
    _configure(socket, options, on_tcp)
    socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing queues for a connection that is not there: sending fails instead
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    if on_tcp and options.curve_server_public is not None:
        public, secret = zmq.curve_keypair()
        socket.setsockopt(zmq.CURVE_SERVERKEY, options.curve_server_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    return socket


def make_router(context: zmq.Context[zmq.Socket[bytes]], options: TransportOptions, on_tcp: bool) -> zmq.Socket[bytes]:
    """Demands CURVE on TCP, where options have the key."""
    socket = context.socket(zmq.ROUTER)
    _configure(socket, options, on_tcp)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a peer that has gone is an error
    if on_tcp and options.curve_server_secret is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(options.curve_server_secret))
        socket.setsockopt(zmq.CURVE_SECRETKEY, options.curve_server_secret)
    return socket


def is_address_in_use(error: zmq.ZMQError) -> bool:
    return error.errno == errno.EADDRINUSE


def _configure(socket: zmq.Socket[bytes], options: TransportOptions, on_tcp: bool) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    if on_tcp:
        _watch_network(socket, options)
    else:
        # More bytes a system call. (On TCP the kernel finds better sizes by itself.)
        socket.setsockopt(zmq.SNDBUF, _IPC_BUFFER_BYTES)
        socket.setsockopt(zmq.RCVBUF, _IPC_BUFFER_BYTES)
    socket.setsockopt(zmq.SNDHWM, 0)  # credits bound what is sent; a full ROUTER would drop silently
    # Honest peers stay below it: their credit ends first. Flooding ones wait in the network.
    socket.setsockopt(zmq.RCVHWM, _UNCREDITED_MESSAGES + options.max_in_flight_bytes // ITEM_OVERHEAD_BYTES)
    largest = max(options.max_message_bytes, MAX_HEADER_BYTES, SLICE_BYTES) + MAX_HEADER_BYTES
    socket.setsockopt(zmq.MAXMSGSIZE, largest)  # ZeroMQ drops a peer that announces more, before it takes memory


def _watch_network(socket: zmq.Socket[bytes], options: TransportOptions) -> None:
    """The kernel ends connections whose network is gone, and ZeroMQ then frees what it holds for them."""
    liveness_ms = max(1, int(options.liveness_s * 1000))
    socket.setsockopt(zmq.TCP_MAXRT, liveness_ms)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, max(1, liveness_ms // 1000))
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
