"""The figures of one stream of one run: what a row of the CSV holds."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from benchmarks.load.records import RequestRecord, RunRecord
from benchmarks.stats.request_metrics import (
    counts,
    e2e_s,
    finished,
    gaps_s,
    judge,
    num_output_tokens,
    tbt_s,
    tpot_s,
    ttft_s,
)
from benchmarks.workloads.stream import Slo


class Quantiles(msgspec.Struct, frozen=True):
    """Milliseconds; `n` values."""

    n: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Rates are per second of the measured window. Attainments are shares of all judged requests, failed ones included."""

    run: str
    stream: str
    requests: int  # judged
    ok: int
    errors: int
    unfinished: int
    cancelled: int
    requests_per_s: float  # that ended well, by their scheduled moment
    output_tokens_per_s: float
    ttft: Quantiles | None
    tpot: Quantiles | None
    itl: Quantiles | None
    e2e: Quantiles | None
    tbt: Quantiles | None
    stalls: int  # gaps above the stall threshold
    stalls_per_request: float | None
    attainment: float | None
    attainment_ttft: float | None
    attainment_tpot: float | None


def quantiles(seconds: Sequence[float] | np.ndarray) -> Quantiles | None:
    values = np.asarray(seconds, dtype=np.float64) * 1e3
    if not len(values):
        return None
    p50, p90, p95, p99 = (float(one) for one in np.percentile(values, (50, 90, 95, 99)))
    return Quantiles(len(values), float(values.mean()), p50, p90, p95, p99, float(values.max()))


def summarise(run: RunRecord, stream: str, records: Sequence[RequestRecord], slo: Slo | None, stall_ms: float) -> Summary:
    """
    Args:
        records: of that run and stream, the warm-up's too.
    """
    judged, good = counts(records), finished(records)
    gaps = np.concatenate([gaps_s(record) for record in good]) if good else np.zeros(0)
    verdicts = [judge(record, slo) for record in judged] if slo else []
    stalls = int((gaps * 1e3 > stall_ms).sum())
    return Summary(
        run=run.id,
        stream=stream,
        requests=len(judged),
        ok=len(good),
        errors=sum(record.status == "error" for record in judged),
        unfinished=sum(record.status == "unfinished" for record in judged),
        cancelled=sum(record.counted and record.status == "cancelled" for record in records),
        requests_per_s=len(good) / run.duration_s,
        output_tokens_per_s=tokens_in_window(records, run.warmup_s, run.duration_s) / run.duration_s,
        ttft=quantiles([value for record in good if (value := ttft_s(record)) is not None]),
        tpot=quantiles([value for record in good if (value := tpot_s(record)) is not None]),
        itl=quantiles(gaps),
        e2e=quantiles([value for record in good if (value := e2e_s(record)) is not None]),
        tbt=quantiles([value for record in good if (value := tbt_s(record)) is not None]),
        stalls=stalls,
        stalls_per_request=stalls / len(good) if good else None,
        attainment=share([verdict.both for verdict in verdicts]),
        attainment_ttft=share([verdict.ttft for verdict in verdicts]),
        attainment_tpot=share([verdict.tpot for verdict in verdicts]),
    )


def share(marks: Sequence[bool]) -> float | None:
    return sum(marks) / len(marks) if marks else None


def tokens_in_window(records: Sequence[RequestRecord], warmup_s: float, duration_s: float) -> float:
    """Output tokens that arrived within the measured window, whichever request they belong to."""
    total = 0.0
    for record in records:
        if record.token_s:
            times = np.asarray(record.token_s)
            inside = ((times >= warmup_s) & (times < warmup_s + duration_s)).sum()
            total += float(inside) * num_output_tokens(record) / len(times)
    return total
