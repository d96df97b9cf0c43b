"""The highest load at which a system still serves well: a search over the load, event in, next load out, no I/O.

Doubling until the target is missed (or halving until it is met), then bisection in the logarithm of the load until the
bracket is narrow enough. Attainment is a noisy measurement, so the answer is the bracket, not a point.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Goodput:
    """`met` is the highest load that met the target, None if none did; `missed` the lowest one above it that did not, None
    if none was tried or all met it."""

    met: float | None
    missed: float | None

    @property
    def estimate(self) -> float:
        """What is known to be served; 0 when even the lowest load was not."""
        return self.met if self.met is not None else 0.0


@dataclass(slots=True)
class GoodputSearch:
    """
    Args:
        start: the first load to try.
        lowest, highest: loads outside are not tried.
        target: share of requests that must meet their SLO.
        tolerance: stop when the bracket's ends are closer than this ratio, such as 1.1.
        max_probes: stop after so many.

    Raises:
        ValueError: the arguments contradict each other.
    """

    start: float
    lowest: float
    highest: float
    target: float = 0.9
    tolerance: float = 1.15
    max_probes: int = 8
    _met: float | None = field(default=None, init=False)
    _missed: float | None = field(default=None, init=False)
    _probes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not 0 < self.lowest <= self.start <= self.highest:
            raise ValueError("start: must lie between lowest and highest")
        if not 0 < self.target <= 1 or self.tolerance <= 1 or self.max_probes < 1:
            raise ValueError("target must be a share, tolerance above 1, and max_probes at least 1")

    def next_load(self) -> float | None:
        """What to measure next; None when it is over."""
        if self._probes >= self.max_probes:
            return None
        if self._probes == 0:
            return self.start
        if self._met is None:
            assert self._missed is not None
            return max(self.lowest, self._missed / 2) if self._missed > self.lowest else None
        if self._missed is None:
            return min(self.highest, self._met * 2) if self._met < self.highest else None
        if self._missed / self._met <= self.tolerance:
            return None
        return math.sqrt(self._met * self._missed)

    def report(self, load: float, attainment: float | None, *, saturated: bool = False) -> None:
        """
        Args:
            attainment: share of requests that met their SLO; None (no request, or an invalid run) counts as missed, so that
                the search ends.
            saturated: the backlog grew: not sustainable, however few requests of a short run have felt it.
        """
        self._probes += 1
        if attainment is not None and attainment >= self.target and not saturated:
            self._met = load if self._met is None else max(self._met, load)
            if self._missed is not None and self._missed <= load:
                self._missed = None  # noise: what was missed below has been met above
        else:
            self._missed = load if self._missed is None else min(self._missed, load)
            if self._met is not None and self._met >= load:
                self._met = None

    def result(self) -> Goodput:
        return Goodput(self._met, self._missed)
