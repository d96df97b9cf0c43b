"""Whether a run went past saturation: its latencies then depend on how long it lasted."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.load.records import RequestRecord

TOLERATED_SHARE = 0.1
DEVIATIONS = 2.0


def is_saturated(records: Sequence[RequestRecord], warmup_s: float, duration_s: float) -> bool:
    """More requests arrived than ended in the second half of the measured window, by more than a tenth and two standard
    deviations of a Poisson count.

    A backlog that grows on is what saturation is; a long but steady queue is none.
    """
    begin, end = warmup_s + duration_s / 2, warmup_s + duration_s
    arrived = sum(begin <= record.scheduled_s < end for record in records)
    ended = sum(record.end_s is not None and begin <= record.end_s < end for record in records)
    return arrived - ended > TOLERATED_SHARE * arrived + DEVIATIONS * math.sqrt(arrived)
