"""The load generator against a server whose times are known: schedule, records, failures, cancellation, cut-off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import numpy as np
from bench_stub import Stub, served
from bench_words import WORDS, no_trace

from benchmarks.load.client import Target
from benchmarks.load.generator import LoadGenerator, LoadResult, Timing
from benchmarks.load.records import RequestRecord
from benchmarks.stats.request_metrics import gaps_s, tpot_s, ttft_s
from benchmarks.workloads.arrivals import Closed, Constant
from benchmarks.workloads.lengths import Fixed
from benchmarks.workloads.plan import StreamPlan, plan_stream
from benchmarks.workloads.stream import Stream

TOLERANCE_S = 0.25
"""A loaded machine wakes up late. Medians are asserted, which one long pause does not move."""


def plan(stream: Stream, duration_s: float = 2.0) -> StreamPlan:
    return plan_stream(stream, 1.0, duration_s, (1, 2), WORDS, no_trace)


async def load(
    stub: Stub, *streams: Stream, duration_s: float = 2.0, warmup_s: float = 0.0, drain_s: float = 10.0, **target: object
) -> LoadResult:
    timing = Timing(warmup_s, duration_s - warmup_s, drain_s, max_lateness_ms=1000)
    plans: Sequence[StreamPlan] = [plan(stream, duration_s) for stream in streams]
    where = Target(stub.url, "stub", **target)  # type: ignore[arg-type]
    return await LoadGenerator("r", where, plans, timing, lambda record: None, lambda record: None).run()


def median(values: Sequence[float | None]) -> float:
    return float(np.median([value for value in values if value is not None]))


async def test_what_the_server_puts_in_is_measured() -> None:
    """First token after 0.3 s, second 0.2 s later (a transfer, say), then one every 0.05 s: each within the tolerance, and
    never below what was put in."""
    async with served(Stub(lambda number: [0.3, 0.2] + [0.05] * 6)) as stub:
        stream = Stream("chat", Constant(8.0), Fixed(12), Fixed(8))
        result = await load(stub, stream)
    records = result.records
    assert len(records) == 16
    assert all(record.status == "ok" and record.http_status == 200 for record in records)
    assert {(record.prompt_tokens, record.output_tokens, len(record.token_s)) for record in records} == {(12, 8, 8)}
    first, second = median([ttft_s(one) for one in records]), median([gaps_s(one)[0] for one in records])
    others, per_token = median([np.median(gaps_s(one)[1:]) for one in records]), median([tpot_s(one) for one in records])
    assert 0.3 <= first <= 0.3 + TOLERANCE_S
    assert 0.2 - 0.05 <= second <= 0.2 + TOLERANCE_S
    assert 0.05 - 0.02 <= others <= 0.05 + TOLERANCE_S
    assert abs(per_token - 0.5 / 7) <= TOLERANCE_S


async def test_requests_leave_at_their_moments_however_slow_the_answers() -> None:
    """Open loop: answers take a second, and twenty requests are on their way by then."""
    async with served(Stub(lambda number: [1.0, 0.01])) as stub:
        stream = Stream("chat", Constant(20.0, offset=0.0), Fixed(3), Fixed(2))
        result = await load(stub, stream, duration_s=1.0)
    assert [round(record.scheduled_s, 3) for record in result.records] == [round(n / 20, 3) for n in range(20)]
    lateness = result.lateness_s()
    assert min(lateness) >= 0
    assert np.median(lateness) < TOLERANCE_S
    assert all(record.status == "ok" for record in result.records)
    assert len(result.loop_lag_s) > 5


async def test_a_closed_loop_keeps_its_concurrency() -> None:
    async with served(Stub(lambda number: [0.1, 0.1])) as stub:
        result = await load(stub, Stream("loop", Closed(3), Fixed(3), Fixed(2)), duration_s=1.5)
    records = sorted(result.records, key=lambda record: record.scheduled_s)
    moments = [(one.scheduled_s, 1) for one in records] + [(one.end_s or 0.0, -1) for one in records]
    running = np.cumsum([change for _, change in sorted(moments)])
    assert running.max() == 3
    assert len(records) >= 6
    assert all(record.scheduled_s < 1.5 for record in records)


async def test_failures_are_records_and_stop_nothing() -> None:
    stub = Stub(lambda number: [0.01, 0.01, 0.01], fails=lambda n: n % 3 == 0, breaks=lambda n: n % 3 == 1)
    async with served(stub):
        result = await load(stub, Stream("chat", Constant(9.0), Fixed(3), Fixed(3)), duration_s=1.0)
    statuses = sorted((record.status, record.http_status) for record in result.records)
    assert statuses == [("error", 200)] * 3 + [("error", 503)] * 3 + [("ok", 200)] * 3
    refused = next(record for record in result.records if record.http_status == 503)
    assert "no room" in refused.error
    assert all(record.end_s is not None for record in result.records)


async def test_a_server_that_is_not_there_fails_every_request() -> None:
    result = await load(Stub(lambda number: [], url="http://127.0.0.1:9"), Stream("chat", Constant(4.0)), duration_s=1.0)
    assert [record.status for record in result.records] == ["error"] * 4
    assert "Connect" in result.records[0].error


async def test_cancelled_requests_leave_the_server() -> None:
    async with served(Stub(lambda number: [0.05] * 200)) as stub:
        stream = Stream("chat", Constant(8.0), Fixed(3), Fixed(200), cancel_rate=1.0, cancel_after_s=0.1)
        result = await load(stub, stream, duration_s=1.0)
        deadline = time.monotonic() + 10
        while stub.disconnected < 8 and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        assert stub.disconnected >= 6  # one that was cancelled at once may never have arrived
    assert {record.status for record in result.records} == {"cancelled"}


async def test_what_runs_at_the_end_of_the_drain_is_cut_off_and_counts_as_unfinished() -> None:
    async with served(Stub(lambda number: [0.1, 60.0])) as stub:
        result = await load(stub, Stream("chat", Constant(3.0), Fixed(3), Fixed(2)), duration_s=1.0, drain_s=0.5)
    assert [record.status for record in result.records] == ["unfinished"] * 3
    assert all(len(record.token_s) == 1 and record.end_s is not None for record in result.records)
    assert result.took_s < 20


async def test_the_warm_up_is_sent_and_not_counted() -> None:
    async with served(Stub(lambda number: [0.01, 0.01])) as stub:
        stream = Stream("chat", Constant(10.0, offset=0.0), Fixed(3), Fixed(2))
        result = await load(stub, stream, duration_s=1.0, warmup_s=0.5)
    assert len(stub.bodies) == 10
    assert [record.counted for record in result.records] == [False] * 5 + [True] * 5


async def test_a_conversation_repeats_all_before_it() -> None:
    async with served(Stub(lambda number: [0.01, 0.01])) as stub:
        stream = Stream("talk", Constant(2.0), Fixed(4), Fixed(2), turns=3, think_s=0.05)
        result = await load(stub, stream, duration_s=1.5)
    talk = sorted((one for one in result.records if one.index == 0), key=lambda record: record.turn)
    assert [record.planned_prompt_tokens for record in talk] == [4, 10, 16]
    assert [record.prompt_tokens for record in talk] == [4, 10, 16]  # with the stub's answers, two words each, between


async def test_a_server_gets_what_its_description_says() -> None:
    async with served(Stub(lambda number: [0.01])) as stub:
        extra = {"ignore_eos": True, "min_tokens": "{output_tokens}"}
        await load(stub, Stream("chat", Constant(1.0), Fixed(3), Fixed(5)), duration_s=1.0, body=extra, stream_usage=False)
    (body,) = stub.bodies
    assert (body["model"], body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == ("stub", 5, 5, True)
    assert "stream_options" not in body


def result_of(lateness_s: Sequence[float], lag_s: Sequence[float]) -> LoadResult:
    records = [RequestRecord("r", "s", n, 0, 1.0, True, 1, 1, sent_s=1.0 + late) for n, late in enumerate(lateness_s)]
    return LoadResult(records, 1.0, list(lag_s))


def test_a_client_that_cannot_keep_up_invalidates_the_run() -> None:
    assert result_of([0.001] * 100, [0.001] * 100).invalid_reason(50) == ""
    assert "sent late: p99" in result_of([0.001] * 90 + [0.2] * 10, [0.0]).invalid_reason(50)
    assert "event loop lagged" in result_of([0.0] * 10, [0.001] * 90 + [0.2] * 10).invalid_reason(50)
    assert "no request was planned" in LoadResult([], 1.0).invalid_reason(50)
