from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service_kit.cpus import available_cpus, format_cpus, parse_cpus, pin, thread_environ


@pytest.mark.parametrize(
    ("text", "cpus"), [("", ()), ("0", (0,)), ("0-3,5", (0, 1, 2, 3, 5)), (" 2 , 1 ", (1, 2)), ("1,1-2", (1, 2))]
)
def test_lists_of_cpus(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "1;2", "1.5"])
def test_what_is_no_list_of_cpus(text: str) -> None:
    with pytest.raises(ValueError, match="list of CPUs"):
        parse_cpus(text)


@given(st.sets(st.integers(0, 200)))
def test_written_lists_read_back(cpus: set[int]) -> None:
    assert set(parse_cpus(format_cpus(cpus))) == cpus


def test_a_cpu_that_is_not_there_is_named() -> None:
    before = available_cpus()
    with pytest.raises(ValueError, match="4000"):
        pin([before[0], 4000])
    assert available_cpus() == before


def test_thread_variables() -> None:
    assert thread_environ(2)["OMP_NUM_THREADS"] == "2"
