"""The goodput search against systems whose goodput is known."""

from __future__ import annotations

import pytest

from benchmarks.stats.goodput import Goodput, GoodputSearch


def run(search: GoodputSearch, capacity: float) -> tuple[Goodput, list[float]]:
    """Against a system that serves all up to `capacity`, and nearly none above."""
    tried = []
    while (load := search.next_load()) is not None:
        tried.append(load)
        search.report(load, 1.0 if load <= capacity else 0.2)
    return search.result(), tried


@pytest.mark.parametrize("capacity", [0.7, 1.0, 3.3, 11.9, 16.0])
def test_the_bracket_holds_the_capacity_and_is_narrow(capacity: float) -> None:
    found, tried = run(GoodputSearch(2.0, 0.25, 32.0, tolerance=1.1, max_probes=20), capacity)
    assert found.met is not None
    assert found.missed is not None
    assert found.met <= capacity < found.missed
    assert found.missed / found.met <= 1.1
    assert len(tried) < 12
    assert found.estimate == found.met


def test_below_the_lowest_load_nothing_was_met() -> None:
    found, tried = run(GoodputSearch(2.0, 0.5, 8.0), capacity=0.1)
    assert found == Goodput(None, 0.5)
    assert tried == [2.0, 1.0, 0.5]
    assert found.estimate == 0.0


def test_above_the_highest_load_it_is_at_least_that() -> None:
    found, tried = run(GoodputSearch(2.0, 0.5, 8.0), capacity=100.0)
    assert found == Goodput(8.0, None)
    assert tried == [2.0, 4.0, 8.0]


def test_it_stops_after_its_probes() -> None:
    found, tried = run(GoodputSearch(2.0, 0.01, 1000.0, max_probes=3), capacity=100.0)
    assert tried == [2.0, 4.0, 8.0]
    assert found == Goodput(8.0, None)


def test_a_saturated_or_invalid_probe_is_a_miss_however_good_it_looks() -> None:
    search = GoodputSearch(2.0, 0.5, 8.0)
    search.report(2.0, 1.0, saturated=True)
    assert search.next_load() == 1.0
    search.report(1.0, None)
    assert search.result() == Goodput(None, 1.0)


def test_noise_that_contradicts_itself_leaves_a_bracket_in_order() -> None:
    search = GoodputSearch(2.0, 0.5, 64.0, max_probes=10)
    search.report(2.0, 0.5)
    search.report(4.0, 0.95)  # better at twice the load
    assert search.result() == Goodput(4.0, None)
    search.report(3.0, 0.1)
    assert search.result() == Goodput(None, 3.0)


@pytest.mark.parametrize(
    "arguments",
    [(1.0, 2.0, 3.0), (4.0, 1.0, 3.0), (1.0, 0.0, 3.0)],
)
def test_bounds_that_contradict_each_other_are_refused(arguments: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="start"):
        GoodputSearch(*arguments)
