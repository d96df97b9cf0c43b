"""Who gets in, and how it ends: refused requests and workers, cancel, drain, close."""

from __future__ import annotations

import asyncio

import pytest
from placement_bench import ADDRESS, bench, read
from placement_fakes import LENGTH, spec, ticket, token_ids

from coordinator.generation import GenerationError
from transport.errors import ChannelClosed
from wire.codec import coordinator_codec
from wire.control import (
    Cancel,
    Drain,
    Generate,
    Heartbeat,
    Leaving,
    Prefill,
    Refused,
    Reserve,
    Reserved,
    Role,
    Welcome,
    WorkerLoad,
)
from wire.ids import Incarnation, WorkerId


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
        states = {row["id"]: row["state"] for row in b.dispatcher.cluster()["workers"]}  # type: ignore[attr-defined]
        assert states == {"d0": "left", "d1": "ready"}
        assert (b.dispatcher.counters["worker_left"], b.dispatcher.counters["worker_gone"]) == (1, 0)


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
        assert await read(generation) == (token_ids(6), LENGTH)


async def test_close_ends_what_is_left_with_an_error() -> None:
    async with bench() as b:
        decode = await b.worker("d0", Role.DECODE)
        await decode.heard(Welcome)
        generation = await b.dispatcher.submit(spec(), "never")
        await b.dispatcher.close()
        with pytest.raises(GenerationError) as raised:
            await read(generation)
        assert raised.value.code == "shutting_down"
