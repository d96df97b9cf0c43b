"""What one request's record says: TTFT, TPOT, ITL and the like. Seconds; None where the request did not get that far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.load.records import RequestRecord
from benchmarks.workloads.stream import Slo

SLOWEST_SHARE = 0.1


def ttft_s(record: RequestRecord) -> float | None:
    """From the scheduled moment to the first piece of text."""
    return record.token_s[0] - record.scheduled_s if record.token_s else None


def gaps_s(record: RequestRecord) -> NDArray[np.float64]:
    """Between consecutive pieces of text, float64 [pieces - 1]; fewer where a server sends several tokens in one piece."""
    return np.diff(np.asarray(record.token_s, dtype=np.float64))


def num_output_tokens(record: RequestRecord) -> int:
    """As the server counts them, or else the pieces that came."""
    return record.output_tokens if record.output_tokens is not None else len(record.token_s)


def tpot_s(record: RequestRecord) -> float | None:
    """Mean time per output token behind the first one; None for fewer than two tokens."""
    tokens = num_output_tokens(record)
    if len(record.token_s) < 2 or tokens < 2:
        return None
    return (record.token_s[-1] - record.token_s[0]) / (tokens - 1)


def e2e_s(record: RequestRecord) -> float | None:
    return record.token_s[-1] - record.scheduled_s if record.token_s and record.status == "ok" else None


def tbt_s(record: RequestRecord) -> float | None:
    """Mooncake's TBT (Qin et al., FAST 2025): the mean of a request's slowest tenth of gaps, at least one."""
    gaps = np.sort(gaps_s(record))
    if not len(gaps):
        return None
    return float(gaps[-math.ceil(len(gaps) * SLOWEST_SHARE) :].mean())


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one request against its SLO. One that failed meets neither; one without a second token has no TPOT to miss."""

    ttft: bool
    tpot: bool

    @property
    def both(self) -> bool:
        return self.ttft and self.tpot


def judge(record: RequestRecord, slo: Slo) -> Verdict:
    if record.status != "ok":
        return Verdict(ttft=False, tpot=False)
    first, per_token = ttft_s(record), tpot_s(record)
    return Verdict(
        ttft=first is not None and first * 1e3 <= slo.ttft_ms, tpot=per_token is None or per_token * 1e3 <= slo.tpot_ms
    )


def counts(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Those that are judged: behind the warm-up, and not given up by the plan."""
    return [record for record in records if record.counted and record.status != "cancelled"]


def finished(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Those whose latencies count."""
    return [record for record in counts(records) if record.status == "ok"]
