"""Intervals and comparisons against closed forms and scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from benchmarks.stats.bootstrap import Values, compare, interval, mean_interval, wilson


def one_each(values: Values) -> list[Values]:
    return [np.array([value]) for value in values]


def test_the_interval_of_a_median_is_the_normal_one() -> None:
    """One value per request: the plain bootstrap. A normal sample's median has the deviation sigma sqrt(pi / 2n)."""
    values = np.random.default_rng(1).normal(10.0, 2.0, 2000)
    found = interval([one_each(values)], 50, seed=2, resamples=2000)
    assert found is not None
    half = 1.96 * 2.0 * np.sqrt(np.pi / 2 / 2000)
    assert found.estimate == pytest.approx(np.median(values))
    assert found.high - found.low == pytest.approx(2 * half, rel=0.2)
    assert found.low < 10.0 < found.high


def test_a_resample_is_what_numpy_makes_of_the_repeated_values() -> None:
    """Requests of several values, two runs, compared with the plain loop over many draws."""
    rng = np.random.default_rng(11)
    runs = [[rng.exponential(1.0, size) for size in sizes] for sizes in ((3, 8, 1, 5), (2, 9, 4))]
    draws = []
    for _ in range(4000):
        chosen = []
        for at in rng.integers(0, 2, 2):
            chosen += [runs[at][index] for index in rng.integers(0, len(runs[at]), len(runs[at]))]
        draws.append(np.percentile(np.concatenate(chosen), 80))
    found = interval(runs, 80, seed=3, resamples=4000)
    assert found is not None
    assert (found.low, found.high) == pytest.approx(tuple(np.percentile(draws, (2.5, 97.5))), rel=0.12)


def test_it_agrees_with_scipys_bootstrap() -> None:
    values = np.random.default_rng(3).exponential(1.0, 300)
    ours = interval([one_each(values)], 90, seed=4, resamples=2000)
    theirs = stats.bootstrap(
        (values,), lambda one, axis: np.percentile(one, 90, axis=axis), method="percentile", n_resamples=2000, rng=5
    ).confidence_interval
    assert ours is not None
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=0.1)


def test_values_of_one_request_stay_together() -> None:
    """50 requests of 40 equal gaps are 50 values, not 2000: the interval is that much wider."""
    levels = np.random.default_rng(6).normal(10.0, 2.0, 50)
    together = interval([[np.full(40, level) for level in levels]], 50, seed=1)
    apart = interval([one_each(np.random.default_rng(6).normal(10.0, 2.0, 2000))], 50, seed=1)
    assert together is not None
    assert apart is not None
    ratio = (together.high - together.low) / (apart.high - apart.low)
    assert ratio == pytest.approx(np.sqrt(40), rel=0.5)


def test_repeats_that_differ_widen_the_interval() -> None:
    """Two runs of a machine that has drifted between them: the drift is in the interval."""
    rng = np.random.default_rng(7)
    drifted = [one_each(rng.normal(level, 0.1, 200)) for level in (9.0, 11.0)]
    found = interval(drifted, 50, seed=1)
    assert found is not None
    assert found.low < 9.2
    assert found.high > 10.8


def test_a_real_difference_is_found_and_none_is_not() -> None:
    rng = np.random.default_rng(8)
    base = [one_each(rng.gamma(4.0, 5.0, 300)) for _ in range(3)]
    same = [one_each(rng.gamma(4.0, 5.0, 300)) for _ in range(3)]
    slow = [one_each(rng.gamma(4.0, 10.0, 300)) for _ in range(3)]
    equal, twice = compare(same, base, 90, seed=1), compare(slow, base, 90, seed=1)
    assert equal is not None
    assert twice is not None
    assert not equal.differs
    assert twice.differs
    assert twice.ratio.estimate == pytest.approx(2.0, rel=0.15)
    assert twice.ratio.low < 2.0 < twice.ratio.high
    assert twice.p_value < 1e-6 < equal.p_value


def test_a_seed_fixes_the_interval() -> None:
    runs = [one_each(np.random.default_rng(9).normal(5.0, 1.0, 50))]
    assert interval(runs, 50, seed=1) == interval(runs, 50, seed=1)


def test_nothing_gives_nothing() -> None:
    empty = [[np.zeros(0)], []]
    assert interval(empty, 50, seed=1) is None
    assert compare(empty, [one_each(np.ones(3))], 50, seed=1) is None
    assert compare([one_each(np.ones(3))], [one_each(np.zeros(3))], 50, seed=1) is None
    assert wilson(0, 0) is None
    assert mean_interval([]) is None


def test_wilsons_interval_is_the_closed_form() -> None:
    found = wilson(45, 50)
    assert found is not None
    z, n, p = stats.norm.ppf(0.975), 50, 0.9
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert (found.low, found.high) == pytest.approx((centre - half, centre + half))


def test_the_mean_of_few_repeats() -> None:
    assert mean_interval([2.0, 4.0]) is not None
    found = mean_interval([2.0, 4.0, 6.0])
    assert found is not None
    half = stats.t.ppf(0.975, 2) * 2.0 / np.sqrt(3)
    assert (found.low, found.high) == pytest.approx((4.0 - half, 4.0 + half))
    two = mean_interval([2.0, 4.0])
    assert two is not None
    assert (two.low, two.high) == (2.0, 4.0)


def test_a_handful_of_requests_proves_nothing() -> None:
    fast, slow = one_each(np.array([1.0, 1.1, 1.2])), one_each(np.array([5.0, 5.1, 5.2]))
    found = compare([slow], [fast], 50, seed=1)
    assert found is not None
    assert found.ratio.low > 1
    assert not found.differs
