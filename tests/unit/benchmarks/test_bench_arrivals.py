"""Arrival processes: rate, burstiness and shape, each against what it should be."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from benchmarks.workloads.arrivals import Constant, Gamma, OpenLoop, Poisson, Ramp, arrival_times, mean_rate

DURATION_S = 2000.0


def times_of(arrivals: OpenLoop, load: float = 1.0, seed: int = 1, duration_s: float = DURATION_S) -> np.ndarray:
    return arrival_times(arrivals, load, duration_s, np.random.default_rng(seed))


@pytest.mark.parametrize(
    "arrivals",
    [Poisson(3.0), Gamma(3.0, burstiness=0.25), Gamma(3.0, burstiness=4.0), Constant(3.0), Ramp(1.0, 5.0)],
    ids=("poisson", "bursty", "regular", "constant", "ramp"),
)
@pytest.mark.parametrize("load", [0.5, 2.0])
def test_the_count_is_rate_times_time(arrivals: OpenLoop, load: float) -> None:
    times = times_of(arrivals, load)
    assert (np.diff(times) >= 0).all()
    assert times[0] >= 0
    assert times[-1] < DURATION_S
    expected = mean_rate(arrivals) * load * DURATION_S
    deviation = np.sqrt(expected / (arrivals.burstiness if isinstance(arrivals, Gamma) else 1.0))
    assert abs(len(times) - expected) < 5 * deviation


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.diff(times_of(Poisson(3.0)))
    assert stats.kstest(gaps, stats.expon(scale=1 / 3.0).cdf).pvalue > 0.001


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_the_variation_of_gamma_gaps_is_one_over_the_burstiness(burstiness: float) -> None:
    gaps = np.diff(times_of(Gamma(3.0, burstiness)))
    assert (gaps.std() / gaps.mean()) ** 2 == pytest.approx(1 / burstiness, rel=0.15)


def test_constant_gaps_are_equal_and_begin_at_the_offset() -> None:
    assert times_of(Constant(4.0, offset=0.0), duration_s=1.0).tolist() == [0.0, 0.25, 0.5, 0.75]
    assert times_of(Constant(4.0), duration_s=1.0).tolist() == [0.125, 0.375, 0.625, 0.875]


def test_a_ramp_rises_linearly() -> None:
    times = times_of(Ramp(0.0, 6.0))
    quarters = np.histogram(times, bins=4, range=(0, DURATION_S))[0] / len(times)
    assert quarters == pytest.approx([1 / 16, 3 / 16, 5 / 16, 7 / 16], abs=0.02)


def test_a_seed_fixes_the_times_and_a_longer_run_begins_alike() -> None:
    assert times_of(Poisson(3.0), seed=9).tolist() == times_of(Poisson(3.0), seed=9).tolist()
    assert times_of(Poisson(3.0), seed=9).tolist() != times_of(Poisson(3.0), seed=10).tolist()
    short, long = times_of(Poisson(3.0), duration_s=10.0), times_of(Poisson(3.0), duration_s=50.0)
    assert long[: len(short)].tolist() == short.tolist()
