"""Accepts channels on one ROUTER socket and hands each frame to its channel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

import zmq

from transport.addresses import IpcAddress, SocketFile, TcpAddress
from transport.base import Listener, OnChannel
from transport.handlers import HandlerTasks
from transport.zmq_channel import ZmqChannel
from transport.zmq_frames import CHANNEL_ID_BYTES, Accept, ByeAck, FrameError, Hello, Limits, Reset, encode
from transport.zmq_incoming import decode_alone
from transport.zmq_sockets import FrameSocket, Link, LinkLost, RouterLink

_CLOSE_LINGER_MS = 200


class MakeChannel(Protocol):
    def __call__(
        self, *, local: str, peer: str, channel_id: bytes, link: Link, theirs: Limits, on_end: Callable[[ZmqChannel], None]
    ) -> ZmqChannel: ...


class ZmqListener(Listener):
    def __init__(
        self,
        *,
        address: TcpAddress | IpcAddress,
        socket: zmq.Socket[bytes],
        own: Limits,
        on_channel: OnChannel,
        make_channel: MakeChannel,
        on_close: Callable[[ZmqListener], None],
    ) -> None:
        self.address = address.text
        self._ipc_file = SocketFile(address.path) if isinstance(address, IpcAddress) else None
        self._own = own
        self._make_channel = make_channel
        self._on_close = on_close
        self._channels: dict[bytes, ZmqChannel] = {}
        self._handlers = HandlerTasks(on_channel)
        self._accepting = True
        self._socket = FrameSocket(socket, self._on_frames)

    async def close(self) -> None:
        if not self._accepting:
            return
        self._accepting = False
        self._on_close(self)
        try:
            await self._handlers.close(self._own.liveness_s)
        finally:
            for channel in list(self._channels.values()):
                channel.abort()
            self._socket.close(_CLOSE_LINGER_MS)
            if self._ipc_file is not None:
                self._ipc_file.remove()

    def _on_frames(self, frames: list[zmq.Frame]) -> None:
        routing_id = frames[0].bytes
        channel = self._channels.get(routing_id)
        if channel is not None:
            channel.deliver(frames[1:])
            return
        try:
            head = decode_alone(frames[1:])
        except FrameError as error:
            self._refuse(routing_id, bytes(CHANNEL_ID_BYTES), f"protocol violation by the peer: {error}")
            return
        match head.body:
            case Reset() | ByeAck():
                return  # the last words of a channel that has ended here too
            case Hello() if self._accepting:
                self._accept(routing_id, head.channel_id, head.body.limits, frames[1])
            case _:
                self._refuse(routing_id, head.channel_id, "this channel does not exist here")

    def _accept(self, routing_id: bytes, channel_id: bytes, theirs: Limits, frame: zmq.Frame) -> None:
        link = RouterLink(self._socket, routing_id, self._forget)
        try:
            link.send(encode(channel_id, 0, Accept(self._own)))
        except LinkLost:
            return  # the dialer has gone; it tries again if it still wants to
        peer = f"{_peer_host(frame)}#{channel_id.hex()}"
        channel = self._make_channel(
            local=self.address, peer=peer, channel_id=channel_id, link=link, theirs=theirs, on_end=lambda _: None
        )
        self._channels[routing_id] = channel
        self._handlers.start(channel)

    def _refuse(self, routing_id: bytes, channel_id: bytes, reason: str) -> None:
        """So that the dialer learns at once."""
        with contextlib.suppress(LinkLost):
            self._socket.send(encode(channel_id, 0, Reset(reason)), routing_id=routing_id)

    def _forget(self, routing_id: bytes) -> None:
        self._channels.pop(routing_id, None)


def _peer_host(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("Peer-Address")) or "local"
    except zmq.ZMQError:
        return "local"  # ipc peers have no address
