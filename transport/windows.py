"""Which bytes of a region may be written, and under which key."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from transport.base import ByteRange
from transport.errors import PlacementRefused

MAX_KEY = 2**64 - 1


def merge_ranges(ranges: Sequence[ByteRange]) -> list[ByteRange]:
    """Sorted, without empty ones; overlapping and adjacent ranges become one."""
    merged: list[ByteRange] = []
    for r in sorted((r for r in ranges if r.nbytes), key=lambda r: r.offset):
        if merged and r.offset <= merged[-1].offset + merged[-1].nbytes:
            end = max(merged[-1].offset + merged[-1].nbytes, r.offset + r.nbytes)
            merged[-1] = ByteRange(merged[-1].offset, end - merged[-1].offset)
        else:
            merged.append(r)
    return merged


def check_window(key: int, ranges: Sequence[ByteRange], region_nbytes: int) -> list[ByteRange]:
    """The merged ranges of a window that is to be opened.

    Raises:
        ValueError: the key does not fit 64 bits, or a range lies outside the region.
    """
    if not 0 <= key <= MAX_KEY:
        raise ValueError("key must be an unsigned 64-bit integer")
    for r in ranges:
        if r.offset < 0 or r.nbytes < 0 or r.offset + r.nbytes > region_nbytes:
            raise ValueError(f"range {r.offset}+{r.nbytes} lies outside the region of {region_nbytes} bytes")
    return merge_ranges(ranges)


class Window:
    """Merged ranges under one key. A put keeps the object while it runs and looks at `is_open` before each piece, or asks to
    be told."""

    __slots__ = ("_starts", "is_open", "ranges", "watchers")

    def __init__(self, ranges: Sequence[ByteRange]) -> None:
        self.ranges = tuple(ranges)
        self.is_open = True
        self.watchers: list[Callable[[], None]] = []
        self._starts = [r.offset for r in self.ranges]

    def covers(self, wanted: ByteRange) -> bool:
        index = bisect_right(self._starts, wanted.offset) - 1
        if index < 0:
            return False
        holding = self.ranges[index]
        return wanted.offset + wanted.nbytes <= holding.offset + holding.nbytes


class WindowTable:
    """The open windows of one region."""

    def __init__(self, region_nbytes: int) -> None:
        self._region_nbytes = region_nbytes
        self._windows: dict[int, Window] = {}

    def __len__(self) -> int:
        return len(self._windows)

    def open(self, key: int, ranges: Sequence[ByteRange]) -> Window:
        """
        Raises:
            ValueError: the key is in use or too large, or a range lies outside the region.
        """
        merged = check_window(key, ranges, self._region_nbytes)
        if key in self._windows:
            raise ValueError("key is in use by another window")
        window = self._windows[key] = Window(merged)
        return window

    def close(self, key: int) -> None:
        window = self._windows.pop(key, None)
        if window is not None:
            window.is_open = False
            for tell in list(window.watchers):
                tell()

    def close_all(self) -> None:
        for key in list(self._windows):
            self.close(key)

    def admit(self, key: int, ranges: Sequence[ByteRange]) -> Window:
        """The window that holds all of `ranges`.

        Raises:
            PlacementRefused: no window is open under the key, or a range lies outside it.
        """
        window = self._windows.get(key)
        if window is None:
            raise PlacementRefused("no window is open under this key")
        for r in ranges:
            if not window.covers(r):
                raise PlacementRefused(f"range {r.offset}+{r.nbytes} lies outside the window")
        return window
