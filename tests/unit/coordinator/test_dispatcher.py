"""The placement half as a whole: dispatcher and hub against scripted workers over the inproc transport."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from placement_fakes import FakeWorker, delta, first_token, spec, ticket, token_at, worker_info
from prometheus_client import CollectorRegistry, generate_latest

from coordinator.cluster_metrics import ClusterMetrics
from coordinator.control_hub import ControlHub
from coordinator.dispatcher import Dispatcher
from coordinator.generation import Generation, GenerationError, Generator
from coordinator.placement_settings import PlacementSettings
from transport.errors import ChannelClosed
from transport.inproc import InprocTransport
from transport.inproc_hub import InprocHub
from wire.codec import coordinator_codec
from wire.control import (
    Cancel,
    CoordinatorMessage,
    DecodePeers,
    Drain,
    FailureKind,
    Generate,
    Heartbeat,
    HeartbeatAck,
    Leaving,
    Prefill,
    Refused,
    RequestFailed,
    Reserve,
    Reserved,
    Role,
    TokenBatch,
    Welcome,
    WorkerLoad,
)
from wire.ids import Incarnation, WorkerId
from wire.sequence import FinishReason

ADDRESS = "inproc://control"
LENGTH = FinishReason.LENGTH


@dataclass
class Bench:
    dispatcher: Dispatcher
    transport: InprocTransport
    workers: list[FakeWorker] = field(default_factory=list)

    async def worker(
        self, name: str, role: Role, incarnation: str | None = None, token: str = "", **info: object
    ) -> FakeWorker:
        worker = FakeWorker(self.transport, worker_info(name, role, incarnation, **info), token)
        self.workers.append(worker)
        await worker.join(ADDRESS)
        return worker

    async def pair(self) -> tuple[FakeWorker, FakeWorker]:
        prefill, decode = await self.worker("p0", Role.PREFILL), await self.worker("d0", Role.DECODE)
        await self.until(lambda: bool(self.dispatcher.view.usable_pairs()))
        return prefill, decode

    async def until(self, holds: Callable[[], bool], timeout_s: float = 5.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not holds():
                await asyncio.sleep(0.005)

    async def everything_empty(self) -> None:
        await self.until(self.dispatcher.holds_nothing)
        await self.until(lambda: not any(worker.holds for worker in self.workers if not worker.ended))


@contextlib.asynccontextmanager
async def bench(**changes: object) -> AsyncIterator[Bench]:
    values: dict[str, object] = {"policy": "always", "tick_s": 0.01}
    settings = PlacementSettings(**(values | changes))  # type: ignore[arg-type]
    shared = InprocHub()
    transport, workers_transport = InprocTransport(shared), InprocTransport(shared)
    dispatcher = Dispatcher(settings, Incarnation("c1"))
    hub = ControlHub(transport, dispatcher, handshake_timeout_s=0.5)
    dispatcher.start()
    await hub.listen(ADDRESS)
    made = Bench(dispatcher, workers_transport)
    try:
        yield made
        await made.everything_empty()
    finally:
        await dispatcher.close()
        await hub.close()
        await transport.close()
        await workers_transport.close()
        for worker in made.workers:
            await worker.stop()
    assert dispatcher.view.members == {}


async def read(generation: Generation) -> tuple[list[int], FinishReason | None]:
    got: list[int] = []
    finish = None
    async with asyncio.timeout(10):
        async for tokens in generation:
            assert finish is None
            got += [token.token_id for token in tokens.tokens]
            finish = tokens.finish
    return got, finish


def ids(stop: int) -> list[int]:
    return [token_at(index).token_id for index in range(stop)]


# -- ordinary work ----------------------------------------------------------------------------------------------------


async def test_a_request_through_both_workers() -> None:
    async with bench() as b:
        generator: Generator = b.dispatcher
        assert not generator.ready()
        assert generator.model is None
        prefill, decode = await b.pair()
        decode.serve_decode()
        prefill.serve_prefill(decode)
        assert generator.ready()
        assert (generator.model, generator.max_model_len) == ("m", 4096)

        generation = await generator.submit(spec(), None)
        assert await read(generation) == (ids(6), LENGTH)

        placement, timeline = generation.placement, generation.timeline
        assert placement is not None
        assert (placement.policy, placement.prefill, placement.decode, placement.fallback) == ("always", "p0", "d0", None)
        assert generation.num_cached_tokens == 3
        assert None not in (timeline.reserve_ms, timeline.prefill_ms, timeline.transfer_ms, timeline.total_ms)
        generation.cancel()  # fine after the end
        assert not await decode.heard(Cancel, 0)


async def test_one_token_needs_prefill_alone() -> None:
    async with bench() as b:
        prefill, decode = await b.pair()
        prefill.serve_prefill()
        generation = await b.dispatcher.submit(spec(max_tokens=1), None)
        assert await read(generation) == (ids(1), LENGTH)
        assert not [m for m in decode.told if isinstance(m, Reserve | Generate)]


async def test_each_request_may_choose_its_policy() -> None:
    async with bench() as b:
        prefill, decode = await b.pair()
        decode.serve_decode()
        prefill.serve_prefill(decode)
        for policy, through in (("always", "p0"), ("never", None), ("auto", None)):
            generation = await b.dispatcher.submit(spec(), policy)  # type: ignore[arg-type]
            assert await read(generation) == (ids(6), LENGTH)
            assert generation.placement is not None
            assert (generation.placement.prefill, generation.placement.fallback) == (through, None)


async def test_auto_asks_for_a_reservation_and_gives_it_up_where_the_cache_holds_most() -> None:
    async with bench(policy="auto", auto_min_prefill_tokens=64) as b:
        prefill, decode = await b.pair()
        prefill.serve_prefill(decode)
        decode.serve_decode()
        for skip, through in ((0, "p0"), (48, None)):
            decode.on[Reserve] = lambda m, skip=skip: [  # type: ignore[misc]
                Reserved(m.spec.request_id, ticket(m.handoff_id, "d0@1", skip))  # type: ignore[union-attr]
            ]
            generation = await b.dispatcher.submit(spec(num_prompt=100), None)
            assert await read(generation) == (ids(6), LENGTH)
            assert generation.placement is not None
            assert generation.placement.prefill == through


async def test_a_burst_spreads_over_all_workers_and_many_tokens_come_in_order() -> None:
    async with bench() as b:
        decode = [await b.worker(f"d{index}", Role.DECODE) for index in range(4)]
        prefill = [await b.worker(f"p{index}", Role.PREFILL) for index in range(2)]
        await b.until(lambda: len(b.dispatcher.view.usable_pairs()) == 8)
        for worker in decode:
            worker.serve_decode()
        for worker in prefill:
            worker.serve_prefill(*decode)
        generations = [await b.dispatcher.submit(spec(num_prompt=64, max_tokens=50, first=n), None) for n in range(80)]
        for got in await asyncio.gather(*map(read, generations)):
            assert got == (ids(50), LENGTH)
        placed = [g.placement for g in generations]
        assert set(Counter(p.decode for p in placed if p).values()) == {20}
        assert set(Counter(p.prefill for p in placed if p).values()) == {40}


async def test_a_shared_prefix_stays_with_one_prefill_worker() -> None:
    async with bench() as b:
        decode = await b.worker("d0", Role.DECODE)
        prefill = [await b.worker(f"p{index}", Role.PREFILL) for index in range(2)]
        await b.until(lambda: len(b.dispatcher.view.usable_pairs()) == 2)
        decode.serve_decode()
        for worker in prefill:
            worker.serve_prefill(decode)
        seen = set()
        for _ in range(6):
            generation = await b.dispatcher.submit(spec(num_prompt=320), None)
            await read(generation)
            assert generation.placement is not None
            seen.add(generation.placement.prefill)
        assert len(seen) == 1
        index, book = b.dispatcher.placer.prefixes, b.dispatcher.placer.assignments
        assert len(index) == 20
        [name] = seen
        [holder] = [worker for worker in prefill if worker.info.worker_id == name]
        assert book.of(holder.info.incarnation).last_serial > 0
        await holder.die()  # and its cache with it
        await b.until(lambda: len(index) == 0)
        assert book.of(holder.info.incarnation).last_serial == 0


# -- failures ---------------------------------------------------------------------------------------------------------


async def test_a_decode_worker_dies_mid_stream_and_the_stream_goes_on() -> None:
    async with bench() as b:
        # 1. d0 sends three of six tokens
        prefill, decode = await b.pair()
        decode.on[Reserve] = lambda m: [Reserved(m.spec.request_id, ticket(m.handoff_id, "d0@1"))]  # type: ignore[union-attr]
        prefill.on[Prefill] = lambda m: [first_token(m.spec.request_id, len(m.spec.resumed))]  # type: ignore[union-attr]
        generation = await b.dispatcher.submit(spec(), None)
        [told] = await prefill.heard(Prefill)
        assert isinstance(told, Prefill)
        await decode.send(TokenBatch((delta(told.spec.request_id, 1, 3),)))
        stream = aiter(generation)
        got = [t.token_id for _ in range(2) for t in (await anext(stream)).tokens]
        assert got == ids(3)
        book = b.dispatcher.placer.assignments
        assert book.of(prefill.info.incarnation).sequences == 0  # its part is done, the decode worker's is not
        assert book.of(decode.info.incarnation).sequences == 1

        # 2. it dies; nobody else is there, and 3. d1 comes within the wait
        await decode.die()
        await b.until(lambda: not b.dispatcher.ready())
        successor = await b.worker("d1", Role.DECODE)
        successor.serve_decode()

        # 4. the rest, from where it stopped
        rest, finish = await read(generation)
        assert got + rest == ids(6)
        assert finish is LENGTH
        assert generation.placement is not None
        assert (generation.placement.decode, generation.placement.fallback) == ("d1", "decode_failed")
        assert b.dispatcher.counters["replay"] == 1
        prefill.holds.clear()


async def test_a_prefill_worker_dies_and_another_takes_over() -> None:
    async with bench() as b:
        prefill, decode = await b.pair()
        decode.serve_decode()
        generation = await b.dispatcher.submit(spec(), None)
        await prefill.heard(Prefill)
        second = await b.worker("p1", Role.PREFILL)
        second.serve_prefill(decode)
        await b.until(lambda: len(b.dispatcher.view.usable_pairs()) == 2)
        [first] = await decode.heard(Reserve)
        await prefill.die()
        assert await read(generation) == (ids(6), LENGTH)
        assert generation.placement is not None
        assert (generation.placement.prefill, generation.placement.fallback) == ("p1", "prefill_failed")
        [cancel] = await decode.heard(Cancel)
        assert isinstance(first, Reserve)
        assert isinstance(cancel, Cancel)
        assert cancel.request_id == first.spec.request_id
        again = (await decode.heard(Reserve, 2))[1]
        assert isinstance(again, Reserve)
        assert again.handoff_id != first.handoff_id
        assert again.spec.request_id != first.spec.request_id


async def test_without_another_prefill_worker_decode_computes_it() -> None:
    async with bench() as b:
        prefill, decode = await b.pair()
        decode.serve_decode()
        prefill.on[Prefill] = lambda m: [RequestFailed(m.spec.request_id, FailureKind.INTERNAL, "boom")]  # type: ignore[union-attr]
        generation = await b.dispatcher.submit(spec(), None)
        assert await read(generation) == (ids(6), LENGTH)
        assert generation.placement is not None
        assert (generation.placement.prefill, generation.placement.fallback) == (None, "prefill_failed")
        prefill.holds.clear()


async def test_late_messages_of_an_earlier_attempt_change_nothing() -> None:
    async with bench(transfer_timeout_s=0.1) as b:
        prefill, decode = await b.pair()
        decode.on[Reserve] = lambda m: [Reserved(m.spec.request_id, ticket(m.handoff_id, "d0@1"))]  # type: ignore[union-attr]
        prefill.on[Prefill] = lambda m: [first_token(m.spec.request_id, 0)]  # type: ignore[union-attr]
        generation = await b.dispatcher.submit(spec(), None)
        [generate] = await decode.heard(Generate)  # the hand-off never came
        [reserve] = await decode.heard(Reserve)
        assert isinstance(generate, Generate)
        assert isinstance(reserve, Reserve)
        old, new = reserve.spec.request_id, generate.spec.request_id
        await decode.send(TokenBatch((delta(old, 1, 6, LENGTH), delta(new, 1, 3))))
        await decode.send(RequestFailed(old, FailureKind.INTERNAL, "late"))
        await prefill.send(first_token(old, 0))
        await decode.send(TokenBatch((delta(new, 3, 6, LENGTH),)))
        assert await read(generation) == (ids(6), LENGTH)
        assert b.dispatcher.counters["protocol_error"] == 0
        decode.holds.clear()
        prefill.holds.clear()


async def test_silence_is_death_and_a_heartbeat_is_acked() -> None:
    async with bench(policy="never", heartbeat_interval_s=0.05, lease_s=0.3, failover_wait_s=0.1) as b:
        decode = await b.worker("d0", Role.DECODE)
        await decode.heard(Welcome)
        for _ in range(5):
            await decode.beat(running=1)
            await asyncio.sleep(0.1)
        await decode.heard(HeartbeatAck, 5)
        assert b.dispatcher.ready()
        generation = await b.dispatcher.submit(spec(), "never")
        with pytest.raises(GenerationError, match="no other was ready") as raised:
            await read(generation)
        assert raised.value.status == 503
        await decode.stop()  # its channel was aborted


async def test_a_successor_takes_over_from_its_predecessor_at_once() -> None:
    async with bench() as b:
        old = await b.worker("d0", Role.DECODE)
        await old.heard(Welcome)
        generation = await b.dispatcher.submit(spec(), "never")
        await old.heard(Generate)
        new = FakeWorker(b.transport, worker_info("d0", Role.DECODE, "d0@2"))
        new.serve_decode()
        b.workers.append(await new.join(ADDRESS))
        assert await read(generation) == (ids(6), LENGTH)
        await old.stop()
        assert list(b.dispatcher.view.members) == ["d0@2"]


async def test_the_same_incarnation_may_dial_again_while_its_old_channel_is_open() -> None:
    async with bench(policy="never") as b:
        old = await b.worker("d0", Role.DECODE)
        await old.heard(Welcome)
        generation = await b.dispatcher.submit(spec(), "never")
        await old.heard(Generate)
        new = FakeWorker(b.transport, old.info)
        new.serve_decode()
        b.workers.append(await new.join(ADDRESS))
        assert await read(generation) == (ids(6), LENGTH)
        await old.stop()
        await asyncio.sleep(0.05)  # the old channel's end is not the new one's
        assert b.dispatcher.ready()


async def test_what_the_protocol_does_not_allow_fails_the_attempt_not_the_coordinator() -> None:
    async with bench() as b:
        decode, other = await b.worker("d0", Role.DECODE), await b.worker("d1", Role.DECODE)
        await decode.heard(Welcome)
        await other.heard(Welcome)
        for worker in (decode, other):
            worker.on[Generate] = lambda m: [first_token(m.spec.request_id, 0)]  # type: ignore[union-attr]
        generation = await b.dispatcher.submit(spec(), "never")
        with pytest.raises(GenerationError, match="given up after 3 replays"):
            await read(generation)
        assert b.dispatcher.counters["protocol_error"] == 4
        await b.everything_empty()


# -- refusals and ends ------------------------------------------------------------------------------------------------


async def test_refusals_at_submit() -> None:
    async with bench(max_outstanding=1) as b:

        async def refused(status: int, code: str | None, **shape: int) -> GenerationError:
            with pytest.raises(GenerationError) as raised:
                await b.dispatcher.submit(spec(**shape), "never")  # type: ignore[arg-type]
            assert (raised.value.status, raised.value.code) == (status, code)
            assert (raised.value.retry_after_s is not None) == (status != 400)
            return raised.value

        await refused(503, "no_worker")
        decode = await b.worker("d0", Role.DECODE, num_blocks=10)
        await decode.heard(Welcome)
        error = await refused(400, "context_length_exceeded", num_prompt=4090, max_tokens=7)
        assert "4090 in the prompt" in error.message
        error = await refused(400, "context_length_exceeded", num_prompt=150, max_tokens=11)  # 161 tokens, 10 blocks of 16
        await refused(400, None, num_prompt=0)
        generation = await b.dispatcher.submit(spec(num_prompt=150, max_tokens=10), "never")
        await refused(429, "too_many_requests")
        generation.cancel()
        with pytest.raises(GenerationError) as raised:
            await read(generation)
        assert raised.value.status == 499
        await decode.heard(Cancel)


async def test_cancel_reaches_both_workers() -> None:
    async with bench() as b:
        prefill, decode = await b.pair()
        decode.on[Reserve] = lambda m: [Reserved(m.spec.request_id, ticket(m.handoff_id, "d0@1"))]  # type: ignore[union-attr]
        generation = await b.dispatcher.submit(spec(), None)
        await prefill.heard(Prefill)
        assert b.dispatcher.placer.assignments.of(prefill.info.incarnation).sequences == 1
        generation.cancel()
        generation.cancel()
        await prefill.heard(Cancel)
        await decode.heard(Cancel)
        assert b.dispatcher.counters["cancel"] == 1


async def test_strangers_are_refused_and_silent_or_mad_ones_are_dropped() -> None:
    async with bench(cluster_token="secret") as b:
        good = await b.worker("d0", Role.DECODE, token="secret")
        await good.heard(Welcome)
        stranger = await b.worker("d1", Role.DECODE, token="guess")
        [refusal] = await stranger.heard(Refused)
        assert isinstance(refusal, Refused)
        assert "token" in refusal.reason
        await stranger.stop()  # closed by the coordinator

        loop = asyncio.get_running_loop()
        for bytes_first in (None, b"\x00garbage", coordinator_codec().encode(Heartbeat(Incarnation("x"), WorkerLoad()))):
            channel = await b.transport.connect(ADDRESS, loop.time() + 5)
            if bytes_first is not None:
                await channel.send(bytes_first)
            with pytest.raises(ChannelClosed):
                await asyncio.wait_for(channel.recv(), 3)
            channel.abort()
        await good.send(Heartbeat(Incarnation("not mine"), WorkerLoad()))
        await good.stop()
        report = b.dispatcher.cluster()
        assert [worker["id"] for worker in report["refused"]] == ["d1"]  # type: ignore[attr-defined,index]


async def test_a_worker_drains_and_leaves() -> None:
    async with bench() as b:
        decode, other = await b.worker("d0", Role.DECODE), await b.worker("d1", Role.DECODE)
        await decode.heard(Welcome)
        await other.heard(Welcome)
        other.serve_decode()
        assert b.dispatcher.drain_worker(WorkerId("d0"), 3.0)
        assert not b.dispatcher.drain_worker(WorkerId("nobody"), 3.0)
        assert (await decode.heard(Drain)) == [Drain(3.0)]
        for _ in range(3):
            generation = await b.dispatcher.submit(spec(), "never")
            await read(generation)
            assert generation.placement is not None
            assert generation.placement.decode == "d1"
        await decode.send(Leaving(decode.info.incarnation, finished=True))
        await decode.stop()
        assert list(b.dispatcher.view.members) == ["d1@1"]


async def test_the_coordinator_drains() -> None:
    async with bench() as b:
        decode = await b.worker("d0", Role.DECODE)
        await decode.heard(Welcome)
        generation = await b.dispatcher.submit(spec(), "never")
        [told] = await decode.heard(Generate)
        assert isinstance(told, Generate)
        assert not await b.dispatcher.drain(0.05)
        assert not b.dispatcher.ready()
        with pytest.raises(GenerationError) as raised:
            await b.dispatcher.submit(spec(), "never")
        assert raised.value.code == "shutting_down"
        late = await b.worker("d1", Role.DECODE)
        assert [m.retry for m in await late.heard(Refused) if isinstance(m, Refused)] == [True]
        draining = asyncio.create_task(b.dispatcher.drain(5.0))
        await decode.send(decode.rest_of(told.spec, 0))
        assert await draining
        assert await read(generation) == (ids(6), LENGTH)


async def test_close_ends_what_is_left_with_an_error() -> None:
    async with bench() as b:
        decode = await b.worker("d0", Role.DECODE)
        await decode.heard(Welcome)
        generation = await b.dispatcher.submit(spec(), "never")
        await b.dispatcher.close()
        with pytest.raises(GenerationError) as raised:
            await read(generation)
        assert raised.value.code == "shutting_down"


async def test_the_cluster_can_be_seen() -> None:
    async with bench() as b:
        prefill, decode = await b.pair()
        decode.serve_decode()
        prefill.serve_prefill(decode)
        await decode.beat(blocks_total=10, blocks_free=6, blocks_cached=3, blocks_held=1, running=2)
        await decode.heard(HeartbeatAck)
        await read(await b.dispatcher.submit(spec(), None))
        gone = await b.worker("d1", Role.DECODE)
        await prefill.heard(DecodePeers, 3)
        await gone.die()
        await b.until(lambda: "d1" in b.dispatcher.view.lost)

        report = json.loads(json.dumps(b.dispatcher.cluster()))
        assert {(w["id"], w["state"]) for w in report["workers"]} == {("p0", "ready"), ("d0", "ready"), ("d1", "lost")}
        [link] = [link for link in report["links"] if link["decode"] == "d0"]
        assert (link["prefill"], link["transport"], link["up"], link["gb_per_s"]) == ("p0", "inproc", True, 1.5)
        assert report["counters"]["route_reserve"] == 1
        assert (report["coordinator"], report["policy"], report["model"]) == ("c1", "always", "m")

        registry = CollectorRegistry()
        d = b.dispatcher
        ClusterMetrics(registry, d.view, d.placer.assignments, d.counters, lambda: d.outstanding)
        text = generate_latest(registry).decode()
        assert 'kvrelay_worker_blocks_cached{role="decode",worker="d0"} 3.0' in text
        assert 'kvrelay_link_up{decode="d0",prefill="p0",transport="inproc"} 1.0' in text
        assert 'kvrelay_placement_events_total{event="route_reserve"} 1.0' in text
        assert "d1" not in text


async def test_messages_are_handled_fast_enough_for_thousands_of_tokens_a_second() -> None:
    """64 sequences, 100 steps: the work per token is bounded, whatever has been generated before."""
    async with bench(policy="never") as b:
        decode = await b.worker("d0", Role.DECODE)
        await decode.heard(Welcome)
        generations = [await b.dispatcher.submit(spec(max_tokens=100), None) for _ in range(64)]
        told: list[CoordinatorMessage] = await decode.heard(Generate, 64)
        requests = [m.spec.request_id for m in told if isinstance(m, Generate)]
        session = b.dispatcher._sessions[decode.info.incarnation]
        begin = asyncio.get_running_loop().time()
        for step in range(100):
            finish = LENGTH if step == 99 else None
            batch = TokenBatch(tuple(delta(request, step, step + 1, finish) for request in requests))
            b.dispatcher.received(batch, session)
        seconds = asyncio.get_running_loop().time() - begin
        assert seconds < 3.0  # 6400 tokens; about 0.1 s on an idle core
        for got in await asyncio.gather(*map(read, generations)):
            assert got == (ids(100), LENGTH)
        decode.holds.clear()
