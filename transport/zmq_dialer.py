"""Connects: one DEALER socket per channel, which is a channel only when the peer has accepted it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable

import zmq

from transport.errors import ConnectTimeout
from transport.zmq_channel import ZmqChannel
from transport.zmq_frames import CHANNEL_ID_BYTES, Accept, FrameError, Hello, Limits, Reset, encode
from transport.zmq_incoming import decode_alone
from transport.zmq_sockets import DealerLink, LinkLost

_CONNECT_POLL_S = 0.005
_PAUSE_AFTER_REFUSAL_S = 0.05
_RESET_LINGER_MS = 200
_MIN_ATTEMPT_S = 1.0

MakeDialed = Callable[[bytes, DealerLink, Limits], ZmqChannel]
OpenSocket = Callable[[], Awaitable[zmq.Socket[bytes]]]
"""A socket that connects to the peer; OSError when its name has no address."""


class DialedConnection:
    """A socket with its handshake, and the channel behind it. A fresh id marks the channel: were the socket to reconnect,
    to the same process or to a successor, nobody there would know the id, and the answer is a reset."""

    def __init__(self, socket: zmq.Socket[bytes], make_channel: MakeDialed) -> None:
        self.outcome: asyncio.Future[ZmqChannel | str] = asyncio.get_running_loop().create_future()
        self._channel_id = secrets.token_bytes(CHANNEL_ID_BYTES)
        self._make_channel = make_channel
        self._channel: ZmqChannel | None = None
        self._link = DealerLink(socket, self._on_frames)

    async def shake_hands(self, own: Limits) -> ZmqChannel | str:
        """The channel, or why the peer refused."""
        hello = encode(self._channel_id, 0, Hello(own))
        while True:
            try:
                self._link.send(hello)
            except LinkLost:
                await asyncio.sleep(_CONNECT_POLL_S)  # not connected yet
            else:
                return await self.outcome

    def abandon(self) -> None:
        if self._channel is not None:
            self._channel.abort()
            return
        try:
            self._link.send(encode(self._channel_id, 0, Reset("the dialer gave up")))
            self._link.close(_RESET_LINGER_MS)
        except LinkLost:
            self._link.close(0)

    def _on_frames(self, frames: list[zmq.Frame]) -> None:
        if self._channel is not None:
            self._channel.deliver(frames)
            return
        try:
            head = decode_alone(frames)
            match head.body:
                case Accept(limits) if head.channel_id == self._channel_id and not self.outcome.done():
                    self._channel = self._make_channel(self._channel_id, self._link, limits)
                    self.outcome.set_result(self._channel)
                case Reset(reason):
                    self._refused(reason)
                case _:
                    raise FrameError(f"{type(head.body).__name__} before the channel was accepted")
        except FrameError as error:
            self._refused(f"protocol violation by the peer: {error}")

    def _refused(self, reason: str) -> None:
        if not self.outcome.done():
            self.outcome.set_result(reason)


async def dial(address: str, deadline: float, own: Limits, open_socket: OpenSocket, make_channel: MakeDialed) -> ZmqChannel:
    """Tries until a peer accepts.

    Raises:
        ConnectTimeout: nobody did before `deadline`; says why the last attempt failed.
    """
    loop = asyncio.get_running_loop()
    reason = "nobody answered"
    while loop.time() < deadline:
        try:
            async with asyncio.timeout_at(min(deadline, loop.time() + max(_MIN_ATTEMPT_S, own.liveness_s))):
                outcome = await _attempt(own, open_socket, make_channel)
        except TimeoutError:
            continue
        if isinstance(outcome, ZmqChannel):
            return outcome
        reason = outcome
        await asyncio.sleep(min(_PAUSE_AFTER_REFUSAL_S, max(0.0, deadline - loop.time())))
    raise ConnectTimeout(f"{address}: {reason}")


async def _attempt(own: Limits, open_socket: OpenSocket, make_channel: MakeDialed) -> ZmqChannel | str:
    try:
        socket = await open_socket()
    except OSError as error:
        return str(error)
    connection = DialedConnection(socket, make_channel)
    outcome: ZmqChannel | str = ""
    try:
        outcome = await connection.shake_hands(own)
    finally:
        if not isinstance(outcome, ZmqChannel):
            connection.abandon()
    return outcome
