from __future__ import annotations

import itertools
import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.base import ByteRange
from transport.errors import PlacementRefused, TransportError
from transport.shm_windows import CONTROL_BYTES, SLOTS, OwnerWindows, TableBusy, WriterWindows
from transport.windows import WindowTable, merge_ranges

REGION = 64
ranges = st.lists(
    st.integers(0, REGION).flatmap(lambda start: st.builds(ByteRange, st.just(start), st.integers(0, REGION - start))),
    max_size=6,
)


def cells(given_ranges: list[ByteRange]) -> set[int]:
    return {cell for r in given_ranges for cell in range(r.offset, r.offset + r.nbytes)}


@settings(max_examples=60, deadline=None)
@given(ranges)
def test_merging_keeps_the_bytes_and_separates_the_ranges(given_ranges: list[ByteRange]) -> None:
    merged = merge_ranges(given_ranges)
    assert cells(merged) == cells(given_ranges)
    assert all(a.offset + a.nbytes < b.offset for a, b in itertools.pairwise(merged))


@pytest.fixture(scope="module")
def control() -> mmap.mmap:
    return mmap.mmap(-1, CONTROL_BYTES)


@settings(max_examples=60, deadline=None)
@given(ranges, ranges.filter(lambda wanted: any(r.nbytes for r in wanted)))
def test_a_window_admits_exactly_its_bytes(control: mmap.mmap, window: list[ByteRange], wanted: list[ByteRange]) -> None:
    """The table in memory and the one in shared memory agree with a set of bytes."""
    wanted = [r for r in wanted if r.nbytes]
    inside = cells(wanted) <= cells(window)
    table = WindowTable(REGION)
    table.open(1, window)
    table.open(2, [ByteRange(0, REGION)])  # another key gives no right
    owner = OwnerWindows(control, REGION)
    owner.open(1, window)
    owner.open(2, [ByteRange(0, REGION)])
    writer = WriterWindows(control)
    for admit in (table.admit, writer.admit):
        if inside:
            admit(1, wanted)
        else:
            with pytest.raises(PlacementRefused):
                admit(1, wanted)
    table.close(1)
    owner.close(1)
    for admit in (table.admit, writer.admit):
        with pytest.raises(PlacementRefused, match="no window"):
            admit(1, wanted)
    owner.detach()
    writer.detach()


def test_a_put_that_runs_sees_its_window_close() -> None:
    table = WindowTable(REGION)
    table.open(1, [ByteRange(0, 8)])
    window = table.admit(1, [ByteRange(0, 8)])
    table.close(1)
    assert not window.is_open
    table.open(1, [ByteRange(0, 8)])  # the same key again is another window
    assert not window.is_open
    assert len(table) == 1


def test_the_shared_table_is_bounded_and_its_slots_come_back() -> None:
    control = mmap.mmap(-1, CONTROL_BYTES)
    owner = OwnerWindows(control, 4 * SLOTS)
    every_other = [ByteRange(4 * n, 1) for n in range(SLOTS)]
    for _ in range(2):
        owner.open(1, every_other)
        with pytest.raises(TransportError, match="window table"):
            owner.open(2, [ByteRange(0, 1)])
        writer = WriterWindows(control)
        writer.admit(1, every_other[::1000])
        owner.close(1)
    owner.open(2, [ByteRange(0, 1)])
    owner.close(2)
    assert len(owner) == 0


def test_a_writer_reads_again_while_the_owner_writes() -> None:
    control = mmap.mmap(-1, CONTROL_BYTES)
    owner = OwnerWindows(control, REGION)
    owner.open(1, [ByteRange(0, 8)])
    writer = WriterWindows(control)
    before = writer.admit(1, [ByteRange(0, 8)])
    np.frombuffer(control, np.uint64, 3)[1] += np.uint64(1)  # in the middle of a change, for ever
    with pytest.raises(TableBusy):
        writer.admit(1, [ByteRange(0, 8)])
    np.frombuffer(control, np.uint64, 3)[1] += np.uint64(1)
    assert writer.admit(1, [ByteRange(0, 8)]) == before + 2


def test_a_segment_without_a_table() -> None:
    with pytest.raises(TransportError, match="window table"):
        WriterWindows(mmap.mmap(-1, CONTROL_BYTES))
