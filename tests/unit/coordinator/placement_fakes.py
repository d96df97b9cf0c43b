"""Values and scripted workers for the placement half's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from transport.base import Channel
from transport.errors import TransportError
from transport.inproc import InprocTransport
from wire.codec import coordinator_codec
from wire.control import (
    Cancel,
    CoordinatorMessage,
    DecodePeers,
    DecodeStages,
    Endpoint,
    FirstToken,
    Generate,
    HandoffTicket,
    Heartbeat,
    LinkReport,
    Prefill,
    PrefillStages,
    Register,
    Reserve,
    Reserved,
    Role,
    TokenBatch,
    TokenDelta,
    WorkerInfo,
    WorkerLoad,
    WorkerMessage,
)
from wire.ids import HandoffId, Incarnation, RequestId, WorkerId
from wire.kv_layout import PROTOCOL_VERSION, Fingerprint
from wire.sequence import FinishReason, SampledToken, SamplingParams, SequenceSpec, StopRules

BLOCK_SIZE = 16
LENGTH = FinishReason.LENGTH


def worker_info(name: str, role: Role, incarnation: str | None = None, **changes: object) -> WorkerInfo:
    values: dict[str, object] = {
        "worker_id": WorkerId(name),
        "incarnation": Incarnation(incarnation or f"{name}@1"),
        "role": role,
        "model": "m",
        "fingerprint": Fingerprint("weights", "layout"),
        "block_size": BLOCK_SIZE,
        "num_blocks": 1000,
        "max_model_len": 4096,
        "vocab_size": 100,
        "max_num_sequences": 64,
        "endpoints": (Endpoint("inproc", f"inproc://{name}"),) if role is Role.DECODE else (),
    }
    return WorkerInfo(**(values | changes))  # type: ignore[arg-type]


def spec(num_prompt: int = 8, max_tokens: int = 6, resumed: tuple[int, ...] = (), first: int = 0) -> SequenceSpec:
    prompt = tuple((first + index) % 97 for index in range(num_prompt))
    return SequenceSpec(RequestId("client"), prompt, SamplingParams(seed=1), StopRules(max_tokens=max_tokens), resumed)


def token_at(index: int) -> SampledToken:
    """Every fake worker draws the same token at the same place, as real ones do for one seed."""
    return SampledToken(1000 + index)


def token_ids(count: int) -> list[int]:
    """Of the first `count` tokens that a sequence gets."""
    return [token_at(index).token_id for index in range(count)]


def ticket(handoff: HandoffId, decode: str, skip_tokens: int = 0) -> HandoffTicket:
    return HandoffTicket(handoff, WorkerId(decode), Incarnation(decode), 1, (), skip_tokens, 60.0)


def first_token(request_id: RequestId, index: int, finish: FinishReason | None = None) -> FirstToken:
    return FirstToken(request_id, token_at(index), finish, PrefillStages(0.001, 0.002, 3))


def delta(
    request_id: RequestId, start: int, stop: int, finish: FinishReason | None = None, stages: bool = False
) -> TokenDelta:
    tokens = tuple(token_at(index) for index in range(start, stop))
    return TokenDelta(request_id, start, tokens, finish, DecodeStages(0.004, 0.005, 0.006, 2) if stages else None)


class FakeWorker:
    """A worker over a real channel. What it does on its own is set by `on`: message type -> what to answer."""

    def __init__(self, transport: InprocTransport, info: WorkerInfo, token: str = "") -> None:
        self.info = info
        self.told: list[CoordinatorMessage] = []
        self.holds: set[RequestId] = set()
        self.on: dict[type, Callable[[CoordinatorMessage], list[WorkerMessage]]] = {}
        self.ended = False
        self._transport = transport
        self._token = token
        self._codec = coordinator_codec()
        self._channel: Channel | None = None
        self._reader: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self.on[DecodePeers] = self._link
        self.on[Cancel] = self._cancel

    async def join(self, address: str) -> FakeWorker:
        self._channel = await self._transport.connect(address, asyncio.get_running_loop().time() + 5)
        await self.send(Register(PROTOCOL_VERSION, self.info, self._token))
        self._reader = asyncio.create_task(self._read())
        return self

    async def send(self, *messages: WorkerMessage) -> None:
        assert self._channel is not None
        for message in messages:
            await self._channel.send(self._codec.encode(message))

    async def beat(self, **load: int) -> None:
        await self.send(Heartbeat(self.info.incarnation, WorkerLoad(**load)))

    async def die(self) -> None:
        """As `kill -9` looks from outside."""
        assert self._channel is not None
        self._channel.abort()
        await self.stop()

    async def stop(self) -> None:
        if self._reader is not None:
            await asyncio.wait_for(self._reader, 5)

    async def heard(self, kind: type, count: int = 1) -> list[CoordinatorMessage]:
        """Wait until it was told `count` messages of a kind."""
        async with asyncio.timeout(5):
            async with self._changed:
                while len(found := [m for m in self.told if isinstance(m, kind)]) < count:
                    await self._changed.wait()
        return found

    def serve_decode(self) -> None:
        """Reserve at once, and compute what `Generate` asks for in one batch."""
        self.on[Reserve] = lambda m: [Reserved(m.spec.request_id, ticket(m.handoff_id, self.info.incarnation))]
        self.on[Generate] = lambda m: [self.rest_of(m.spec, len(m.spec.resumed))]

    def rest_of(self, of: SequenceSpec, start: int) -> TokenBatch:
        self.holds.discard(of.request_id)
        return TokenBatch((delta(of.request_id, start, of.stop.max_tokens, LENGTH, stages=True),))

    def serve_prefill(self, *decode: FakeWorker) -> None:
        """Draw the first token at once; the hand-off makes D go on."""
        peers = {worker.info.incarnation: worker for worker in decode}

        def prefill(message: CoordinatorMessage) -> list[WorkerMessage]:
            assert isinstance(message, Prefill)
            of, index = message.spec, len(message.spec.resumed)
            self.holds.discard(of.request_id)
            if message.ticket is None:
                return [first_token(of.request_id, index, LENGTH)]
            peer = peers[message.ticket.decode_incarnation]
            self._tasks.append(asyncio.create_task(peer.send(peer.rest_of(of, index + 1))))
            return [first_token(of.request_id, index)]

        self._tasks: list[asyncio.Task[None]] = []
        self.on[Prefill] = prefill

    def _link(self, message: CoordinatorMessage) -> list[WorkerMessage]:
        assert isinstance(message, DecodePeers)
        return [LinkReport(p.worker_id, p.incarnation, True, "inproc", 1.5) for p in message.peers]

    def _cancel(self, message: CoordinatorMessage) -> list[WorkerMessage]:
        assert isinstance(message, Cancel)
        self.holds.discard(message.request_id)
        return []

    async def _read(self) -> None:
        assert self._channel is not None
        try:
            while True:
                message: CoordinatorMessage = self._codec.decode((await self._channel.recv()).header)
                if isinstance(message, Reserve | Generate | Prefill):
                    self.holds.add(message.spec.request_id)
                await self.send(*self.on.get(type(message), lambda _: [])(message))
                async with self._changed:
                    self.told.append(message)
                    self._changed.notify_all()
        except TransportError:
            self.ended = True
