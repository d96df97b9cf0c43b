"""How many per second, lately."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class RateMeter:
    """Counts over the last `window_s` seconds, in slots of a tenth of that."""

    def __init__(self, clock: Callable[[], float], window_s: float = 5.0) -> None:
        self._clock = clock
        self._window_s = window_s
        self._slot_s = window_s / 10
        self._slots: deque[tuple[int, int]] = deque()  # (slot number, count)

    def add(self, count: int) -> None:
        slot = int(self._clock() / self._slot_s)
        if self._slots and self._slots[-1][0] == slot:
            self._slots[-1] = (slot, self._slots[-1][1] + count)
        else:
            self._slots.append((slot, count))
            self._expire(slot)

    def per_second(self) -> float:
        self._expire(int(self._clock() / self._slot_s))
        return sum(count for _, count in self._slots) / self._window_s

    def _expire(self, slot: int) -> None:
        while self._slots and self._slots[0][0] <= slot - 10:
            self._slots.popleft()
