"""Any transport with faults: it loses, delays, repeats, reorders, damages or cuts what a `FaultPlan` says. For tests.

A wrapper, so that no real transport knows of it. What it does to a

    message     drop: it is never sent (or never received). delay: this one and all behind it wait. duplicate: twice.
                reorder: the next one overtakes it. corrupt: one bit of its header. cut: the channel is aborted instead
    put         drop: the last `share` of its bytes is not written, and it reports success. delay: it stands still in the
                middle of its bytes. duplicate: written twice. reorder: second half first. corrupt: one bit of the bytes,
                behind whatever checksum was taken of the source. cut: after half of the bytes the channel is aborted
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence

from transport.base import Allocate, Buffer, Channel, Listener, Message, OnChannel, Region, RemoteRegion, Transport, Write
from transport.buffers import as_bytes
from transport.errors import ChannelClosed, TransportError
from transport.fault_rules import FaultAction, FaultPlan, FaultRule, Operation

_CUT = "cut by a fault"


class FaultyTransport(Transport):
    """
    Args:
        link: which rules are meant (`FaultRule.link`).
    """

    def __init__(self, inner: Transport, plan: FaultPlan, link: str) -> None:
        self.scheme = inner.scheme
        self.owns_memory = inner.owns_memory
        self._inner = inner
        self._plan = plan
        self._link = link

    def create_region(self, nbytes: int, memory: memoryview | None = None) -> Region:
        return self._inner.create_region(nbytes, memory)

    async def listen(self, address: str, on_channel: OnChannel) -> Listener:
        async def on_faulty(channel: Channel) -> None:
            await on_channel(FaultyChannel(channel, self._plan, self._link))

        return await self._inner.listen(address, on_faulty)

    async def connect(self, address: str, deadline: float) -> Channel:
        return FaultyChannel(await self._inner.connect(address, deadline), self._plan, self._link)

    async def close(self) -> None:
        await self._inner.close()


class FaultyChannel(Channel):
    def __init__(self, inner: Channel, plan: FaultPlan, link: str) -> None:
        self.local = inner.local
        self.peer = inner.peer
        self.plan = plan
        self.link = link
        self._inner = inner
        self._turn = asyncio.Lock()
        self._overtaken: tuple[bytes, tuple[bytes, ...]] | None = None  # sent behind the next message
        self._waiting: asyncio.Task[None] | None = None
        self._received: deque[Message] = deque()

    async def send(self, header: bytes, buffers: Sequence[Buffer] = ()) -> None:
        async with self._turn:
            rule = self.plan.strike(self.link, Operation.SEND, header)
            match rule.action if rule else None:
                case FaultAction.DROP:
                    return
                case FaultAction.CUT:
                    self._inner.abort()
                    raise ChannelClosed(_CUT)
                case FaultAction.DELAY:
                    assert rule is not None
                    await asyncio.sleep(rule.seconds)
                case FaultAction.CORRUPT:
                    header = _damaged(header, rule)
                case FaultAction.DUPLICATE:
                    await self._inner.send(header, buffers)
                case FaultAction.REORDER if self._overtaken is None:
                    assert rule is not None
                    self._overtaken = (header, tuple(bytes(as_bytes(buffer)) for buffer in buffers))
                    self._waiting = asyncio.create_task(self._send_alone(rule.seconds), name="overtaken-message")
                    return
            await self._inner.send(header, buffers)
            await self._send_overtaken()

    async def recv(self, allocate: Allocate | None = None) -> Message:
        while not self._received:
            message = await self._inner.recv(allocate)
            rule = self.plan.strike(self.link, Operation.RECV, message.header)
            match rule.action if rule else None:
                case FaultAction.DROP:
                    continue
                case FaultAction.CUT:
                    self._inner.abort()
                    raise ChannelClosed(_CUT)
                case FaultAction.CORRUPT:
                    message = Message(_damaged(message.header, rule), message.buffers)
                case FaultAction.DUPLICATE:
                    self._received.append(message)
            self._received.append(message)
            if rule is not None and rule.action is FaultAction.DELAY:
                await asyncio.sleep(rule.seconds)  # cancelled, it is still there for the next call
            elif rule is not None and rule.action is FaultAction.REORDER:
                await self._let_one_overtake(rule.seconds, allocate)
        return self._received.popleft()

    async def open_region(self, descriptor: bytes) -> RemoteRegion:
        return FaultyRemoteRegion(await self._inner.open_region(descriptor), self)

    async def close(self) -> None:
        async with self._turn:
            await self._send_overtaken()
        self._forget_overtaken()
        await self._inner.close()

    def abort(self) -> None:
        self._forget_overtaken()
        self._inner.abort()

    async def _let_one_overtake(self, seconds: float, allocate: Allocate | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                self._received.appendleft(await self._inner.recv(allocate))
        except TimeoutError:
            return

    async def _send_alone(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        async with self._turn:
            try:
                await self._send_overtaken()
            except TransportError:
                return  # the channel has ended, and the message with it

    async def _send_overtaken(self) -> None:
        if self._overtaken is not None:
            header, buffers = self._overtaken
            self._overtaken = None
            await self._inner.send(header, buffers)

    def _forget_overtaken(self) -> None:
        self._overtaken = None
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


class FaultyRemoteRegion(RemoteRegion):
    def __init__(self, inner: RemoteRegion, channel: FaultyChannel) -> None:
        self.nbytes = inner.nbytes
        self._inner = inner
        self._channel = channel

    @property
    def path(self) -> str:
        return self._inner.path

    async def put(self, key: int, writes: Sequence[Write]) -> None:
        rule = self._channel.plan.strike(self._channel.link, Operation.PUT)
        total = sum(as_bytes(write.source).nbytes for write in writes)
        first, second = _split(writes, total // 2)
        match rule.action if rule else None:
            case FaultAction.DROP:
                assert rule is not None
                kept, _ = _split(writes, total - round(total * rule.share))
                await self._inner.put(key, kept)
            case FaultAction.DELAY:
                assert rule is not None
                await self._inner.put(key, first)
                await asyncio.sleep(rule.seconds)
                await self._inner.put(key, second)
            case FaultAction.DUPLICATE:
                await self._inner.put(key, writes)
                await self._inner.put(key, writes)
            case FaultAction.REORDER:
                await self._inner.put(key, second)
                await self._inner.put(key, first)
            case FaultAction.CORRUPT:
                payload = b"".join(as_bytes(write.source) for write in writes)
                await self._inner.put(key, _refilled(writes, _damaged(payload, rule)))
            case FaultAction.CUT:
                await self._inner.put(key, first)
                self._channel.abort()
                raise ChannelClosed(_CUT)
            case None:
                await self._inner.put(key, writes)


def _damaged(payload: bytes, rule: FaultRule | None) -> bytes:
    """One bit of it flipped; which one follows from the payload, so that a run can be repeated."""
    if not payload:
        return payload
    rng = random.Random(f"{rule.seed if rule else 0} {len(payload)} {payload[:64].hex()}")  # noqa: S311
    changed = bytearray(payload)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _split(writes: Sequence[Write], nbytes: int) -> tuple[list[Write], list[Write]]:
    """The first `nbytes` of a put, and the rest."""
    first: list[Write] = []
    second: list[Write] = []
    for write in writes:
        source = as_bytes(write.source)
        head = min(nbytes, len(source))
        nbytes -= head
        if head:
            first.append(Write(write.offset, source[:head]))
        if head < len(source):
            second.append(Write(write.offset + head, source[head:]))
    return first, second


def _refilled(writes: Sequence[Write], payload: bytes) -> list[Write]:
    """The same places with other bytes."""
    refilled: list[Write] = []
    start = 0
    for write in writes:
        end = start + as_bytes(write.source).nbytes
        refilled.append(Write(write.offset, payload[start:end]))
        start = end
    return refilled
