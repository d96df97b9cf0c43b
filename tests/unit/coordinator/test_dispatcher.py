"""The placement half as a whole: dispatcher and hub against scripted workers over the inproc transport."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

from placement_bench import bench, read
from placement_fakes import LENGTH, delta, spec, ticket, token_ids
from prometheus_client import CollectorRegistry, generate_latest

from coordinator.cluster_metrics import ClusterMetrics
from coordinator.generation import Generator
from wire.control import (
    Cancel,
    CoordinatorMessage,
    DecodePeers,
    Generate,
    HeartbeatAck,
    Reserve,
    Reserved,
    Role,
    TokenBatch,
    Welcome,
)


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
        assert await read(generation) == (token_ids(6), LENGTH)

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
        assert await read(generation) == (token_ids(1), LENGTH)
        assert not [m for m in decode.told if isinstance(m, Reserve | Generate)]


async def test_each_request_may_choose_its_policy() -> None:
    async with bench() as b:
        prefill, decode = await b.pair()
        decode.serve_decode()
        prefill.serve_prefill(decode)
        for policy, through in (("always", "p0"), ("never", None), ("auto", None)):
            generation = await b.dispatcher.submit(spec(), policy)  # type: ignore[arg-type]
            assert await read(generation) == (token_ids(6), LENGTH)
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
            assert await read(generation) == (token_ids(6), LENGTH)
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
            assert got == (token_ids(50), LENGTH)
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
        await b.until(lambda: "d1" in b.dispatcher.view.former)

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
            assert got == (token_ids(100), LENGTH)
        decode.holds.clear()
