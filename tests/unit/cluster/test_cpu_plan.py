from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cpu_plan import CpuShare, cpu_share, parse_cpu_lists, split_evenly


def test_one_list_is_split_evenly() -> None:
    lists = parse_cpu_lists("0-3")
    assert cpu_share(lists, 0, 2, 8, 4) == CpuShare((0, 1), 2)
    assert cpu_share(lists, 1, 2, 8, 4) == CpuShare((2, 3), 2)
    assert cpu_share(lists, 2, 2, 8, 4) == CpuShare((0, 1), 2)  # scaled out later: doubles up


def test_lists_are_one_per_worker() -> None:
    lists = parse_cpu_lists("0; 2-3")
    assert [cpu_share(lists, index, 9, 8, 9).cpus for index in range(3)] == [(0,), (2, 3), (0,)]


@pytest.mark.parametrize(("num_cpus", "num_workers", "threads"), [(8, 2, 4), (8, 3, 2), (2, 5, 1), (1, 0, 1)])
def test_without_pinning_the_threads_are_shared(num_cpus: int, num_workers: int, threads: int) -> None:
    assert cpu_share((), 0, 1, num_cpus, num_workers) == CpuShare((), threads)


@pytest.mark.parametrize("text", ["0;;1", ";", "a", "0;b"])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(ValueError, match="list of CPUs"):
        parse_cpu_lists(text)


@given(st.sets(st.integers(0, 63), min_size=1), st.integers(1, 40))
def test_every_worker_gets_a_cpu_and_every_cpu_a_worker(cpus: set[int], num_parts: int) -> None:
    parts = split_evenly(tuple(sorted(cpus)), num_parts)
    assert len(parts) == num_parts
    assert all(parts)
    if len(cpus) >= num_parts:
        assert [cpu for part in parts for cpu in part] == sorted(cpus)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
