"""Lengths against their closed forms."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from benchmarks.workloads.lengths import Fixed, Lengths, LogNormal, Uniform, Zipf, draw_lengths, mean_length

COUNT = 20_000


@pytest.mark.parametrize(
    "lengths",
    [Fixed(7), Uniform(10, 30), LogNormal(mean=200.0, sigma=0.5), Zipf(exponent=1.2, low=5, high=50)],
    ids=lambda one: type(one).__name__,
)
def test_the_mean_is_the_closed_form(lengths: Lengths) -> None:
    drawn = draw_lengths(lengths, COUNT, np.random.default_rng(1))
    assert drawn.dtype == np.int64
    error = 5 * drawn.std() / np.sqrt(COUNT) + 0.5  # rounding shifts a mean by half a token at most
    assert abs(drawn.mean() - mean_length(lengths)) <= error


def test_a_uniform_length_takes_both_ends() -> None:
    drawn = draw_lengths(Uniform(3, 5), 1000, np.random.default_rng(2))
    assert sorted(set(drawn.tolist())) == [3, 4, 5]


def test_a_log_normal_length_has_the_asked_spread_and_is_cut() -> None:
    rng = np.random.default_rng(3)
    drawn = draw_lengths(LogNormal(mean=5000.0, sigma=0.7), COUNT, rng)
    assert np.log(drawn).std() == pytest.approx(0.7, rel=0.03)
    cut = draw_lengths(LogNormal(mean=100.0, sigma=1.0, low=50, high=120), COUNT, rng)
    assert (cut.min(), cut.max()) == (50, 120)


def test_a_zipf_length_follows_its_power() -> None:
    drawn = draw_lengths(Zipf(exponent=1.0, low=1, high=100), COUNT, np.random.default_rng(4))
    counts = np.bincount(drawn, minlength=101)[1:]
    expected = COUNT / (np.arange(1, 101) * (1 / np.arange(1, 101)).sum())
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert chi2 < 99 + 5 * np.sqrt(2 * 99)  # 99 degrees of freedom, five standard deviations


def test_a_distribution_that_contradicts_itself_is_refused_by_name() -> None:
    with pytest.raises(msgspec.ValidationError, match="high: must not be below low"):
        msgspec.convert({"dist": "uniform", "low": 9, "high": 3}, Lengths)
    with pytest.raises(msgspec.ValidationError, match=r"\$\.tokens"):
        msgspec.convert({"dist": "fixed", "tokens": 0}, Lengths)
