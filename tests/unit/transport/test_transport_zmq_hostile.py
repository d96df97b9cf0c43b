"""Peers that speak ZeroMQ but not this protocol, or not any more; and peers without the right key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import zmq
import zmq.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transport.base import ByteRange, Channel
from transport.errors import ChannelClosed, ConnectTimeout
from transport.options import TransportOptions
from transport.zmq_frames import (
    Accept,
    Body,
    Bye,
    Hello,
    Limits,
    MessageHead,
    Pulse,
    PutBegin,
    PutData,
    PutDone,
    Reset,
    decode,
    encode,
)
from transport.zmq_transport import ZmqTransport

LIMITS = Limits(1 << 20, 1 << 20, 5.0)
ID = b"raw-peer"
Frames = list[bytes]


def soon(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


class Stage:
    """A transport that listens, and raw sockets."""

    def __init__(self) -> None:
        self.transport = ZmqTransport(
            TransportOptions(liveness_s=5.0, max_in_flight_bytes=1 << 20, max_message_bytes=1 << 20)
        )
        self.context = zmq.asyncio.Context()
        self.accepted: asyncio.Queue[Channel] = asyncio.Queue()
        self.ends: asyncio.Queue[str] = asyncio.Queue()
        self.address = ""
        self._sockets: list[zmq.asyncio.Socket] = []

    async def start(self) -> None:
        self.address = (await self.transport.listen("tcp://127.0.0.1:0", self._serve)).address

    async def _serve(self, channel: Channel) -> None:
        await self.accepted.put(channel)
        try:
            while True:
                await channel.send((await channel.recv()).header)
        except ChannelClosed as error:
            await self.ends.put(str(error))

    def raw(self, kind: int = zmq.DEALER) -> zmq.asyncio.Socket:
        socket = self.context.socket(kind)
        self._sockets.append(socket)
        socket.linger = 0
        if kind == zmq.DEALER:
            socket.connect(self.address)
        return socket

    async def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        self.context.term()
        await self.transport.close()

    async def raw_channel(self) -> zmq.asyncio.Socket:
        """A raw peer whose channel was accepted."""
        socket = self.raw()
        await socket.send(encode(ID, 0, Hello(LIMITS)))
        assert isinstance(decode(memoryview(await answer(socket))).body, Accept)
        return socket

    async def works(self) -> None:
        channel = await self.transport.connect(self.address, soon(5))
        await channel.send(b"still here")
        assert (await asyncio.wait_for(channel.recv(), 5)).header == b"still here"
        await channel.close()
        assert await asyncio.wait_for(self.ends.get(), 5) == "closed by the peer"


async def answer(socket: zmq.asyncio.Socket) -> bytes:
    return (await asyncio.wait_for(socket.recv_multipart(), 5))[0]


async def reset_of(socket: zmq.asyncio.Socket) -> str:
    while True:
        body = decode(memoryview(await answer(socket))).body
        if isinstance(body, Reset):
            return body.reason


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    made = Stage()
    await made.start()
    yield made
    await made.close()


def on_a_stage(scenario: Callable[[Stage], object]) -> None:
    """hypothesis runs synchronously: a loop of its own for each example."""

    async def run() -> None:
        made = Stage()
        await made.start()
        try:
            await scenario(made)  # type: ignore[misc]
        finally:
            await made.close()

    asyncio.run(run())


garbage_frames = st.lists(st.binary(max_size=60), min_size=1, max_size=4)
near_frames = st.builds(
    lambda kind, rest, more: [b"KVRZ\x02" + bytes([kind]) + b"\0\0" + ID + bytes(8) + rest, *more],
    st.integers(0, 15).filter(lambda kind: kind not in (9, 10, 11, 12)),
    st.binary(max_size=60),
    st.lists(st.binary(max_size=20), max_size=3),
)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(garbage_frames | near_frames, min_size=1, max_size=10))
def test_garbage_without_a_channel(items: list[Frames]) -> None:
    async def scenario(stage: Stage) -> None:
        socket = stage.raw()
        for item in items:
            await socket.send_multipart(item)
        await stage.works()

    on_a_stage(scenario)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(garbage_frames)
def test_garbage_ends_its_channel_and_nothing_else(item: Frames) -> None:
    async def scenario(stage: Stage) -> None:
        socket = await stage.raw_channel()
        await socket.send_multipart(item)
        assert "protocol violation" in await reset_of(socket)
        assert "protocol violation" in await asyncio.wait_for(stage.ends.get(), 5)
        await stage.works()

    on_a_stage(scenario)


VIOLATIONS: dict[str, list[tuple[Body, Frames]]] = {
    "second hello": [(Hello(LIMITS), [])],
    "accept from a dialer": [(Accept(LIMITS), [])],
    "a tail longer than announced": [(MessageHead(b"h", (5,)), [b"123456"])],
    "an empty frame in a tail": [(MessageHead(b"h", (5,)), [b"", b"12345"])],
    "a tail cut elsewhere": [(MessageHead(b"h", (5, 5)), [b"123", b"4567890"])],
    "message beyond the limit": [(MessageHead(b"h", (1 << 20,)), [])],
    "message of more than there is": [(MessageHead(b"h", (2**63,)), [])],
    "messages beyond the credit": [(MessageHead(b"h", (900_000,)), [bytes(900_000)])] * 5,
    "data without a put": [(PutData(1, 0, b"x"), [])],
    "data beyond the credit": [(PutData(1, 2**40), [])],
    "puts that overlap": [
        (PutBegin(1, bytes(16), 1, (ByteRange(0, 1),)), []),
        (PutBegin(1, bytes(16), 1, (ByteRange(0, 1),)), []),
    ],
}


@pytest.mark.parametrize("case", VIOLATIONS)
async def test_violations_end_the_channel(stage: Stage, case: str) -> None:
    socket = await stage.raw_channel()
    channel = await stage.accepted.get()
    if case == "messages beyond the credit":
        # The handler stops receiving after the first messages, so nothing is granted again.
        channel.send = lambda *_: asyncio.sleep(60)  # type: ignore[method-assign,assignment]
    for body, payload in VIOLATIONS[case]:
        for frame in (encode(ID, 0, body), *payload):
            await socket.send(frame)
    assert "protocol violation" in await reset_of(socket)
    with pytest.raises(ChannelClosed, match="protocol violation"):
        await channel.open_region(b"")


async def test_multipart_messages_end_the_channel(stage: Stage) -> None:
    """Nobody of ours sends them: reading them is what libzmq may abort in."""
    socket = await stage.raw_channel()
    await socket.send_multipart([encode(ID, 0, Pulse()), b"x"])
    assert "2 parts" in await reset_of(socket)
    assert "2 parts" in await asyncio.wait_for(stage.ends.get(), 5)
    await stage.works()


async def test_credit_that_was_never_taken(stage: Stage) -> None:
    socket = await stage.raw_channel()
    await socket.send(encode(ID, 1 << 60, Pulse()))
    assert "granted" in await reset_of(socket)


async def test_answers_to_nothing_are_ignored(stage: Stage) -> None:
    socket = await stage.raw_channel()
    await socket.send(encode(ID, 0, PutDone(5, None)))
    await socket.send(encode(ID, 0, MessageHead(b"hello")))
    while not isinstance(decode(memoryview(head := (await socket.recv_multipart())[0])).body, MessageHead):
        pass
    assert decode(memoryview(head)).channel_id == ID
    await socket.send(encode(ID, 0, Bye()))
    assert await asyncio.wait_for(stage.ends.get(), 5) == "closed by the peer"


async def test_a_frame_that_is_too_large_costs_its_sender_the_connection(stage: Stage) -> None:
    socket = await stage.raw_channel()
    await socket.send(bytes(40 << 20))
    # ZeroMQ itself drops the connection; the reconnected socket has no channel.
    await asyncio.sleep(0.3)
    await socket.send(encode(ID, 0, Pulse()))
    assert "does not exist" in await reset_of(socket)


async def test_another_version_is_refused_by_name(stage: Stage) -> None:
    socket = stage.raw()
    hello = bytearray(encode(ID, 0, Hello(LIMITS)))
    hello[4] = 1
    await socket.send(bytes(hello))
    assert "version 1" in await reset_of(socket)


async def test_a_successor_does_not_revive_channels() -> None:
    """The listener dies and another takes its address: the dialer's reconnected socket is told so at once."""
    first, second = Stage(), Stage()
    await first.start()
    dialer = ZmqTransport(TransportOptions(liveness_s=30.0))
    channel = await dialer.connect(first.address, soon(5))
    # 1. The first listener's socket vanishes without a word, as in a crash.
    listener = next(iter(first.transport._listeners))
    listener._socket.close(0)
    # 2. A successor binds the same port. (liveness is far away: only the reset can tell)
    await second.transport.listen(first.address, second._serve)
    second.address = first.address
    start = soon(0)

    async def insist() -> None:
        while True:
            await channel.send(b"are you there?")
            await asyncio.sleep(0.02)

    with pytest.raises(ChannelClosed, match=r"does not exist|lost"):
        await asyncio.wait_for(insist(), 5)
    assert soon(0) - start < 3
    await second.works()
    for owner in (dialer, first, second):
        await owner.close()


async def test_a_listener_that_sends_garbage(stage: Stage) -> None:
    router = stage.raw(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    connecting = asyncio.create_task(stage.transport.connect(f"tcp://127.0.0.1:{port}", soon(0.5)))
    routing_id, _ = await asyncio.wait_for(router.recv_multipart(), 5)
    await router.send_multipart([routing_id, b"HTTP/1.1 400 Bad Request"])
    with pytest.raises(ConnectTimeout, match=r"protocol violation|nobody"):
        await connecting


async def test_an_acceptor_that_turns_bad(stage: Stage) -> None:
    router = stage.raw(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    connecting = asyncio.create_task(stage.transport.connect(f"tcp://127.0.0.1:{port}", soon(5)))
    routing_id, hello = await asyncio.wait_for(router.recv_multipart(), 5)
    channel_id = decode(memoryview(hello)).channel_id
    await router.send_multipart([routing_id, encode(channel_id, 0, Accept(LIMITS))])
    channel = await connecting
    await router.send_multipart([routing_id, encode(b"another1", 0, Pulse())])
    with pytest.raises(ChannelClosed, match="another channel"):
        await asyncio.wait_for(channel.recv(), 5)


async def test_curve_lets_in_only_who_has_the_servers_key() -> None:
    public, secret = zmq.curve_keypair()
    other_public, _ = zmq.curve_keypair()
    server = ZmqTransport(TransportOptions(curve_server_secret=secret))

    async def echo(channel: Channel) -> None:
        await channel.send((await channel.recv()).header)
        await channel.recv()

    listener = await server.listen("tcp://127.0.0.1:0", echo)
    for wrong in (None, other_public):
        stranger = ZmqTransport(TransportOptions(curve_server_public=wrong))
        with pytest.raises(ConnectTimeout):
            await stranger.connect(listener.address, soon(0.4))
        await stranger.close()
    friend = ZmqTransport(TransportOptions(curve_server_public=public))
    channel = await friend.connect(listener.address, soon(5))
    await channel.send(b"secret")
    assert (await asyncio.wait_for(channel.recv(), 5)).header == b"secret"
    # And a client that demands a key does not talk to a server without one.
    plain = ZmqTransport()
    open_listener = await plain.listen("tcp://127.0.0.1:0", echo)
    with pytest.raises(ConnectTimeout):
        await friend.connect(open_listener.address, soon(0.4))
    for transport in (friend, server, plain):
        await transport.close()
