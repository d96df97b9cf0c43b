"""Chained block hashes: equal prefixes meet, and nothing else does (case K4)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wire.block_hash import block_hashes

TOKENS = st.lists(st.integers(0, 2**31), max_size=40)


@given(tokens=TOKENS, block_size=st.integers(1, 8))
def test_one_hash_per_full_block(tokens: list[int], block_size: int) -> None:
    assert len(list(block_hashes(tokens, block_size))) == len(tokens) // block_size


@given(left=TOKENS, right=TOKENS, block_size=st.integers(1, 8))
def test_hashes_agree_exactly_as_far_as_the_full_blocks_do(left: list[int], right: list[int], block_size: int) -> None:
    pairs = zip(block_hashes(left, block_size), block_hashes(right, block_size), strict=False)
    for number, (mine, theirs) in enumerate(pairs, start=1):
        end = number * block_size
        assert (mine == theirs) == (left[:end] == right[:end])


def test_K4_parts_cannot_run_together() -> None:
    by_two = list(block_hashes([1, 2, 3, 4], 2))
    by_three = list(block_hashes([1, 2, 3, 4], 3))
    assert not set(by_two) & set(by_three)
    assert not set(block_hashes([1, 2], 2, "a")) & set(block_hashes([1, 2], 2, ""))
    assert not set(block_hashes([1, 2], 2, "ab")) & set(block_hashes([1, 2], 2, "a"))


def test_the_same_in_every_process() -> None:
    """A constant: processes of one cluster, and its next version, must agree."""
    assert next(block_hashes([1, 2, 3, 4], 4)).hex()[:16] == "c22c506aa49f1daf"
