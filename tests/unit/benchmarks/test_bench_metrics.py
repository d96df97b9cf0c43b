"""Latencies, verdicts, saturation and summaries of records whose figures are known."""

from __future__ import annotations

import numpy as np
import pytest
from bench_records import record, run_record

from benchmarks.stats.request_metrics import Verdict, e2e_s, gaps_s, judge, tbt_s, tpot_s, ttft_s
from benchmarks.stats.saturation import is_saturated
from benchmarks.stats.summary import quantiles, summarise, tokens_in_window
from benchmarks.workloads.stream import Slo

SLO = Slo(ttft_ms=500, tpot_ms=100)


def test_latencies_count_from_the_scheduled_moment() -> None:
    one = record([1.3, 1.4, 1.6], scheduled_s=1.0)
    one.sent_s = 1.2  # late, and no excuse
    assert ttft_s(one) == pytest.approx(0.3)
    assert gaps_s(one) == pytest.approx([0.1, 0.2])
    assert tpot_s(one) == pytest.approx(0.15)
    assert e2e_s(one) == pytest.approx(0.6)


def test_tpot_divides_by_tokens_and_not_by_pieces() -> None:
    """A server that sent 9 tokens in 3 pieces."""
    assert tpot_s(record([0.1, 0.5, 0.9], output_tokens=9)) == pytest.approx(0.1)
    assert tpot_s(record([0.1])) is None


def test_tbt_is_the_mean_of_the_slowest_tenth() -> None:
    gaps = [0.01] * 18 + [0.5, 0.3]
    times = np.cumsum([0.0, *gaps])
    assert tbt_s(record(list(times))) == pytest.approx(0.4)
    assert tbt_s(record([0.0, 0.2])) == pytest.approx(0.2)
    assert tbt_s(record([0.0])) is None


@pytest.mark.parametrize(
    ("tokens", "status", "expected"),
    [
        ([0.5, 0.6], "ok", Verdict(ttft=True, tpot=True)),
        ([0.51, 0.6], "ok", Verdict(ttft=False, tpot=True)),
        ([0.1, 0.21], "ok", Verdict(ttft=True, tpot=False)),
        ([0.1], "ok", Verdict(ttft=True, tpot=True)),
        ([0.1, 0.15], "error", Verdict(ttft=False, tpot=False)),
        ([0.1, 0.15], "unfinished", Verdict(ttft=False, tpot=False)),
    ],
)
def test_a_request_is_judged_by_both_targets(tokens: list[float], status: str, expected: Verdict) -> None:
    found = judge(record(tokens, status=status), SLO)  # type: ignore[arg-type]
    assert found == expected
    assert found.both == (expected.ttft and expected.tpot)


def test_a_growing_backlog_is_saturation_and_a_steady_queue_is_none() -> None:
    arrivals = np.arange(0, 20, 0.1)
    steady = [record([at + 3.0], scheduled_s=at) for at in arrivals]
    growing = [record([at * 2], scheduled_s=at) for at in arrivals]  # it serves half of what comes
    assert not is_saturated(steady, 0.0, 20.0)
    assert is_saturated(growing, 0.0, 20.0)
    assert not is_saturated([], 0.0, 20.0)


def test_a_few_late_ends_are_noise() -> None:
    records = [record([at + 0.5], scheduled_s=at) for at in (1, 3, 5, 7, 9)]
    assert not is_saturated([*records, record([30.0], scheduled_s=9.5)], 0.0, 10.0)


def test_a_summary_counts_failures_and_leaves_out_the_warm_up_and_cancellations() -> None:
    records = [
        record([1.0, 1.05], scheduled_s=0.9, counted=False),
        record([2.1, 2.15, 2.45], scheduled_s=2.0),
        record([3.6, 3.65], scheduled_s=3.0),
        record([], scheduled_s=4.0, status="error"),
        record([5.1], scheduled_s=5.0, status="unfinished"),
        record([6.1, 6.2], scheduled_s=6.0, status="cancelled"),
    ]
    found = summarise(run_record(duration_s=10.0), "chat", records, SLO, stall_ms=200)
    assert (found.requests, found.ok, found.errors, found.unfinished, found.cancelled) == (4, 2, 1, 1, 1)
    assert found.attainment == 0.0
    assert found.attainment_ttft == 0.25
    assert found.attainment_tpot == 0.25
    assert found.stalls == 1
    assert found.itl is not None
    assert found.itl.n == 3
    assert found.itl.max == pytest.approx(300)
    assert found.requests_per_s == pytest.approx(0.2)
    assert found.output_tokens_per_s == pytest.approx(1.0)  # 2 + 3 + 2 + 0 + 1 + 2, whoever they belong to


def test_an_empty_stream_has_no_figures_rather_than_zeros() -> None:
    found = summarise(run_record(), "chat", [], SLO, stall_ms=200)
    assert (found.ttft, found.itl, found.attainment, found.stalls_per_request) == (None, None, None, None)


def test_quantiles_are_numpys() -> None:
    values = np.random.default_rng(1).gamma(2.0, 0.1, 997)
    found = quantiles(values)
    assert found is not None
    assert [found.p50, found.p90, found.p95, found.p99] == pytest.approx(
        [float(one) * 1e3 for one in np.quantile(values, (0.5, 0.9, 0.95, 0.99))]
    )


def test_only_tokens_within_the_window_count() -> None:
    records = [record([0.5, 1.5, 2.5, 3.5]), record([1.0, 2.0], output_tokens=10)]
    assert tokens_in_window(records, warmup_s=1.0, duration_s=2.0) == pytest.approx(2 + 10)
