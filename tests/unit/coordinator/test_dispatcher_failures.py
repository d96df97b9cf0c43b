"""What the placement half does when workers die, fail, fall silent or break the protocol."""

from __future__ import annotations

import asyncio

import pytest
from placement_bench import ADDRESS, bench, read
from placement_fakes import LENGTH, FakeWorker, delta, first_token, spec, ticket, token_ids, worker_info

from coordinator.generation import GenerationError
from wire.control import (
    Cancel,
    FailureKind,
    Generate,
    HeartbeatAck,
    Prefill,
    RequestFailed,
    Reserve,
    Reserved,
    Role,
    TokenBatch,
    Welcome,
)


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
        assert got == token_ids(3)
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
        assert got + rest == token_ids(6)
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
        assert await read(generation) == (token_ids(6), LENGTH)
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
        assert await read(generation) == (token_ids(6), LENGTH)
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
        assert await read(generation) == (token_ids(6), LENGTH)
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
        assert await read(generation) == (token_ids(6), LENGTH)
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
        assert await read(generation) == (token_ids(6), LENGTH)
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
