"""The window table of a shared-memory region, kept in the segment's first pages so that writers can look.

    header   magic (8) | sequence (8) | number of slots in use (8) | spare
    keys     u64 × SLOTS       one slot per range; a window of several ranges has several slots with its key
    offsets  u64 × SLOTS
    nbytes   u64 × SLOTS       0: the slot is free

The owner alone writes. It makes `sequence` odd, changes slots, makes it even again (a seqlock): a writer that sees an odd
or a changed number reads again. This guards against mistakes and late writers, not against a hostile process of the same
user, which may write wherever the mapping reaches. Plain loads and stores: their order holds on x86-64; elsewhere the
system calls that carry the key to the writer, and its answers back, order them.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from transport.base import ByteRange
from transport.errors import PlacementRefused, TransportError
from transport.windows import Window, check_window

SLOTS = 16384
_HEADER_BYTES = 4096
CONTROL_BYTES = _HEADER_BYTES + 3 * 8 * SLOTS  # a multiple of the page size
_MAGIC = int.from_bytes(b"KVRSHM01", "little")
_READ_ATTEMPTS = 100
U64 = npt.NDArray[np.uint64]


class TableBusy(Exception):
    """Look again a little later."""


class _ControlArea:
    """The arrays in the mapping."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self.header: U64 = np.frombuffer(mapping, np.uint64, 3)
        columns = np.frombuffer(mapping, np.uint64, 3 * SLOTS, _HEADER_BYTES).reshape(3, SLOTS)
        self.keys: U64 = columns[0]
        self.offsets: U64 = columns[1]
        self.nbytes: U64 = columns[2]

    def close(self) -> None:
        """Lets go of the mapping, whoever still holds this object (a traceback does)."""
        self.header = self.keys = self.offsets = self.nbytes = np.empty(0, np.uint64)


class OwnerWindows:
    """The owner's side: opens and closes windows."""

    def __init__(self, mapping: mmap.mmap, region_nbytes: int) -> None:
        self._area = _ControlArea(mapping)
        self._region_nbytes = region_nbytes
        self._slots: dict[int, list[int]] = {}
        self._free: list[int] = []
        self._used = 0
        self._area.header[0] = _MAGIC

    def __len__(self) -> int:
        return len(self._slots)

    def open(self, key: int, ranges: Sequence[ByteRange]) -> None:
        """
        Raises:
            ValueError: the key is in use or too large, or a range lies outside the region.
            TransportError: more separate ranges are open than the table holds.
        """
        merged = check_window(key, ranges, self._region_nbytes)
        if key in self._slots:
            raise ValueError("key is in use by another window")
        if len(merged) > len(self._free) + SLOTS - self._used:
            raise TransportError(f"the window table holds {SLOTS} ranges and has no room for {len(merged)} more")
        slots = [self._take_slot() for _ in merged]
        area = self._area
        area.header[1] += np.uint64(1)
        for slot, r in zip(slots, merged, strict=True):
            area.keys[slot] = key
            area.offsets[slot] = r.offset
            area.nbytes[slot] = r.nbytes
        area.header[2] = self._used
        area.header[1] += np.uint64(1)
        self._slots[key] = slots

    def close(self, key: int) -> None:
        slots = self._slots.pop(key, None)
        if slots is None:
            return
        self._area.header[1] += np.uint64(1)
        self._area.nbytes[slots] = 0
        self._area.header[1] += np.uint64(1)
        self._free += slots

    def detach(self) -> None:
        """Closes every window and lets go of the mapping."""
        for key in list(self._slots):
            self.close(key)
        self._area.close()

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        self._used += 1
        return self._used - 1


class WriterWindows:
    """The writer's side: looks before it copies."""

    def __init__(self, mapping: mmap.mmap) -> None:
        """
        Raises:
            TransportError: the segment's first pages are not a window table.
        """
        self._area = _ControlArea(mapping)
        if int(self._area.header[0]) != _MAGIC:
            self._area.close()
            raise TransportError("the segment does not start with a window table")

    def detach(self) -> None:
        """Lets go of the mapping."""
        self._area.close()

    @property
    def sequence(self) -> int:
        """Unchanged since `admit` read it: the windows are the same."""
        return int(self._area.header[1])

    def admit(self, key: int, ranges: Sequence[ByteRange]) -> int:
        """The sequence number under which all of `ranges` lie in the window of `key`.

        Raises:
            PlacementRefused: they do not, or no window is open under the key.
            TableBusy: the owner is changing the table. It may have lost its core in the middle of that, for as long as the
                scheduler likes: no ground for a refusal.
        """
        sequence, window = self._read(key)
        if not window.ranges:
            raise PlacementRefused("no window is open under this key")
        for r in ranges:
            if not window.covers(r):
                raise PlacementRefused(f"range {r.offset}+{r.nbytes} lies outside the window")
        return sequence

    def _read(self, key: int) -> tuple[int, Window]:
        area = self._area
        for _ in range(_READ_ATTEMPTS):
            before = self.sequence
            if before % 2:
                continue
            used = min(int(area.header[2]), SLOTS)
            slots = np.flatnonzero((area.keys[:used] == np.uint64(key)) & (area.nbytes[:used] > 0))
            offsets, sizes = area.offsets[slots].tolist(), area.nbytes[slots].tolist()
            if self.sequence == before:
                return before, Window([ByteRange(o, n) for o, n in sorted(zip(offsets, sizes, strict=True))])
        raise TableBusy("the owner is changing its window table")
