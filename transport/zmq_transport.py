"""ZeroMQ channels over `tcp://host:port` and `ipc://path`.

CURVE encrypts tcp:// when keys are given; an ipc:// socket is a file that only this user may use.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import zmq

from transport.addresses import IpcAddress, TcpAddress, claim_ipc_path, parse_address, resolve
from transport.base import Channel, Listener, OnChannel, Region, Transport
from transport.errors import AddressError, TransportError
from transport.options import TransportOptions
from transport.zmq_channel import ZmqChannel
from transport.zmq_dialer import dial
from transport.zmq_frames import Limits
from transport.zmq_listener import ZmqListener
from transport.zmq_regions import RegionSpace, ZmqRegions
from transport.zmq_sockets import DealerLink, Link, is_address_in_use, make_dealer, make_router

_REBIND_WAIT_S = 0.3  # ZeroMQ frees the port of a listener that was just closed in its own thread


class ZmqTransport(Transport):
    scheme = "zmq"
    owns_memory = False

    def __init__(self, options: TransportOptions | None = None, regions: RegionSpace | None = None) -> None:
        self._options = options or TransportOptions()
        self._regions: RegionSpace = regions or ZmqRegions()
        self._limits = Limits(self._options.max_in_flight_bytes, self._options.max_message_bytes, self._options.liveness_s)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(self._options.io_threads)
        self._channels: set[ZmqChannel] = set()
        self._listeners: set[ZmqListener] = set()
        self._open = True

    def create_region(self, nbytes: int, memory: memoryview | None = None) -> Region:
        self._check_open()
        return self._regions.create(nbytes, memory)

    async def listen(self, address: str, on_channel: OnChannel) -> Listener:
        self._check_open()
        wanted = parse_address(address)
        socket = make_router(self._context, self._options, on_tcp=isinstance(wanted, TcpAddress))
        try:
            bound = await self._bind_tcp(socket, wanted) if isinstance(wanted, TcpAddress) else _bind_ipc(socket, wanted)
        except BaseException:
            socket.close(0)
            raise
        listener = ZmqListener(
            address=bound,
            socket=socket,
            own=self._limits,
            on_channel=on_channel,
            make_channel=self._make_channel,
            on_close=self._listeners.discard,
        )
        self._listeners.add(listener)
        return listener

    async def connect(self, address: str, deadline: float) -> Channel:
        self._check_open()
        wanted = parse_address(address)
        if isinstance(wanted, TcpAddress) and (wanted.port == 0 or wanted.host == "*"):
            raise AddressError(f"{address} cannot be connected to")

        async def open_socket() -> zmq.Socket[bytes]:
            target = await resolve(wanted) if isinstance(wanted, TcpAddress) else wanted
            self._check_open()
            socket = make_dealer(self._context, self._options, on_tcp=isinstance(wanted, TcpAddress))
            _connect(socket, target)
            return socket

        def make_channel(channel_id: bytes, link: DealerLink, theirs: Limits) -> ZmqChannel:
            channel = self._make_channel(
                local=f"#{channel_id.hex()}",
                peer=address,
                channel_id=channel_id,
                link=link,
                theirs=theirs,
                on_end=self._channels.discard,
            )
            self._channels.add(channel)
            return channel

        return await dial(address, deadline, self._limits, open_socket, make_channel)

    async def close(self) -> None:
        if not self._open:
            return
        self._open = False
        try:
            for listener in list(self._listeners):
                await listener.close()
        finally:
            for channel in list(self._channels):
                channel.abort()
            self._regions.close()
            await asyncio.to_thread(self._context.term)  # waits for the last words of its sockets, a fraction of a second

    def _check_open(self) -> None:
        if not self._open:
            raise TransportError("the transport is closed")

    def _make_channel(
        self, *, local: str, peer: str, channel_id: bytes, link: Link, theirs: Limits, on_end: Callable[[ZmqChannel], None]
    ) -> ZmqChannel:
        channel = ZmqChannel(
            local=local,
            peer=peer,
            channel_id=channel_id,
            link=link,
            own=self._limits,
            theirs=theirs,
            find_region=self._regions.find,
            open_region=self._regions.open,
            on_end=on_end,
        )
        self._regions.attach(channel)
        return channel

    async def _bind_tcp(self, socket: zmq.Socket[bytes], wanted: TcpAddress) -> TcpAddress:
        loop = asyncio.get_running_loop()
        try:
            target = await resolve(wanted)
        except OSError as error:
            raise AddressError(f"{wanted.text}: {error}") from error
        if ":" in target.host:
            socket.setsockopt(zmq.IPV6, 1)
        end = loop.time() + _REBIND_WAIT_S
        while True:
            try:
                socket.bind(target.text)
                break
            except zmq.ZMQError as error:
                if not is_address_in_use(error) or loop.time() >= end:
                    raise AddressError(f"{wanted.text}: {error}") from error
            await asyncio.sleep(0.02)
        endpoint = bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        host = wanted.host if wanted.host != "*" else endpoint.removeprefix("tcp://").rsplit(":", 1)[0]
        return TcpAddress(host, int(endpoint.rsplit(":", 1)[1]))


def _bind_ipc(socket: zmq.Socket[bytes], wanted: IpcAddress) -> IpcAddress:
    claim_ipc_path(wanted)
    try:
        socket.bind(wanted.text)
        os.chmod(wanted.path, 0o600)
    except OSError as error:  # zmq.ZMQError is not one
        raise AddressError(f"{wanted.text}: {error}") from error
    except zmq.ZMQError as error:
        raise AddressError(f"{wanted.text}: {error}") from error
    return wanted


def _connect(socket: zmq.Socket[bytes], target: TcpAddress | IpcAddress) -> None:
    if isinstance(target, TcpAddress) and ":" in target.host:
        socket.setsockopt(zmq.IPV6, 1)
    try:
        socket.connect(target.text)
    except zmq.ZMQError as error:
        socket.close(0)
        raise AddressError(f"{target.text}: {error}") from error
