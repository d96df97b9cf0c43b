"""Confidence intervals and comparisons by resampling.

Requests of one run share its queues and its noise, and gaps of one request share its fate. So the bootstrap resamples in two
stages: runs (repeats) with replacement, then whole requests within each of them (Davison and Hinkley 1997, 3.8). With few
repeats the interval is honest about requests and rough about the machine's drift; say how many there were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

RESAMPLES = 1000
LEVEL = 0.95
MIN_REQUESTS = 10
"""Below that on either side, no difference is claimed: a resample of a handful of requests is mostly the same handful."""
MAX_CELLS = 2_000_000
"""Of the table of weights that is held at a time."""

Values = NDArray[np.float64]
Repeats = Sequence[Sequence[Values]]
"""Of each run, of each request, its values: all its gaps, or one TTFT."""


@dataclass(frozen=True, slots=True)
class Interval:
    estimate: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """`ratio` of a statistic, A over B, and how sure that is.

    `p_value` is Mann and Whitney's two-sided test on one value per request (the request's own mean), pooled over repeats:
    whether one topology's requests tend to be slower. It takes requests as independent, which queueing makes too
    optimistic: the interval decides `differs`.
    """

    ratio: Interval
    p_value: float
    num_requests: int  # of the one that has fewer

    @property
    def differs(self) -> bool:
        """The interval excludes 1, and there were enough requests for an interval to mean anything."""
        return self.num_requests >= MIN_REQUESTS and not self.ratio.low <= 1.0 <= self.ratio.high


def interval(repeats: Repeats, percent: float, seed: int, resamples: int = RESAMPLES) -> Interval | None:
    """A percentile of all values together, and its interval; None where there are no values."""
    pool = _Pool.of(repeats)
    if pool is None:
        return None
    drawn = pool.resampled(percent, np.random.default_rng(seed), resamples)
    low, high = np.percentile(drawn, (50 * (1 - LEVEL), 100 - 50 * (1 - LEVEL)))
    return Interval(pool.percentile(percent), float(low), float(high))


def compare(a: Repeats, b: Repeats, percent: float, seed: int, resamples: int = RESAMPLES) -> Comparison | None:
    """A percentile of A against that of B; None where one of them has no values, or B's is 0."""
    pool_a, pool_b = _Pool.of(a), _Pool.of(b)
    if pool_a is None or pool_b is None or pool_b.percentile(percent) == 0:
        return None
    rng = np.random.default_rng(seed)
    above, below = pool_a.resampled(percent, rng, resamples), pool_b.resampled(percent, rng, resamples)
    low, high = np.percentile(above[below > 0] / below[below > 0], (50 * (1 - LEVEL), 100 - 50 * (1 - LEVEL)))
    ratio = pool_a.percentile(percent) / pool_b.percentile(percent)
    test = stats.mannwhitneyu(pool_a.means, pool_b.means, alternative="two-sided")
    num_requests = min(len(pool_a.means), len(pool_b.means))
    return Comparison(Interval(ratio, float(low), float(high)), float(test.pvalue), num_requests)


def wilson(successes: int, trials: int) -> Interval | None:
    """Wilson's interval for a share (1927); None without trials."""
    if trials == 0:
        return None
    found = stats.binomtest(successes, trials).proportion_ci(LEVEL, method="wilson")
    return Interval(successes / trials, float(found.low), float(found.high))


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Of few independent values, such as one goodput per repeat: Student's t from three on, the range below."""
    if not values:
        return None
    mean = float(np.mean(values))
    if len(values) < 3 or np.ptp(values) == 0:
        return Interval(mean, float(min(values)), float(max(values)))
    low, high = stats.t.interval(LEVEL, len(values) - 1, loc=mean, scale=stats.sem(values))
    return Interval(mean, float(low), float(high))


class _Pool:
    """All values of several runs in order, and which request and run each belongs to.

    A resample is a count for each request: how often it was drawn. Its percentile is found in the cumulative counts over the
    ordered values, as `numpy.percentile` would find it in the values repeated that often (linear between ranks).
    """

    def __init__(self, runs: Sequence[Sequence[Values]]) -> None:
        requests = [values for run in runs for values in run]
        values = np.concatenate(requests)
        order = np.argsort(values, kind="stable")
        self._values = values[order]
        self._request_of = np.repeat(np.arange(len(requests)), [len(one) for one in requests])[order]
        self._run_sizes = [len(run) for run in runs]
        self.means: Values = np.array([one.mean() for one in requests])

    @classmethod
    def of(cls, repeats: Repeats) -> _Pool | None:
        """None where there are no values."""
        runs = [[values for values in run if len(values)] for run in repeats]
        runs = [run for run in runs if run]
        return cls(runs) if runs else None

    def percentile(self, percent: float) -> float:
        return float(np.percentile(self._values, percent))

    def resampled(self, percent: float, rng: np.random.Generator, resamples: int) -> Values:
        """The percentile of each resample, float64 [resamples]."""
        rows = max(1, MAX_CELLS // len(self._values))
        pieces = [
            self._percentiles(percent, self._draw(rng, min(rows, resamples - done))) for done in range(0, resamples, rows)
        ]
        return np.concatenate(pieces)

    def _draw(self, rng: np.random.Generator, rows: int) -> NDArray[np.int64]:
        """How often each request was drawn, int64 [rows, requests]: runs with replacement, then requests within each."""
        num_runs = len(self._run_sizes)
        times = rng.multinomial(num_runs, np.full(num_runs, 1 / num_runs), size=rows)  # [rows, runs]
        columns = [
            rng.multinomial(times[:, run] * size, np.full(size, 1 / size)) for run, size in enumerate(self._run_sizes)
        ]
        return np.concatenate(columns, axis=1)

    def _percentiles(self, percent: float, counts: NDArray[np.int64]) -> Values:
        reached = np.cumsum(counts[:, self._request_of], axis=1)  # [rows, values]
        ranks = (reached[:, -1] - 1) * (percent / 100)
        lower = self._at_rank(reached, np.floor(ranks))
        upper = self._at_rank(reached, np.ceil(ranks))
        found: Values = lower + (upper - lower) * (ranks - np.floor(ranks))
        return found

    def _at_rank(self, reached: NDArray[np.int64], ranks: Values) -> Values:
        """The value at each row's rank, from 0: the first one whose cumulative count is above it."""
        found: Values = self._values[(reached <= ranks[:, None]).sum(axis=1)]
        return found
