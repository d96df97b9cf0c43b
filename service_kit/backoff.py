"""Jittered, capped exponential backoff (full jitter, as in dask/distributed's connect)."""

from __future__ import annotations

import random


class Backoff:
    """Delays in seconds: uniform in [base/2, base], where base doubles up to `cap_s`; `reset` after a success."""

    def __init__(self, first_s: float = 0.1, cap_s: float = 2.0, rng: random.Random | None = None) -> None:
        self._first_s = first_s
        self._cap_s = cap_s
        self._base_s = first_s
        self._rng = rng or random.Random()  # noqa: S311 - spreads reconnects, protects nothing

    def next_delay(self) -> float:
        delay = self._rng.uniform(self._base_s / 2, self._base_s)
        self._base_s = min(self._base_s * 2, self._cap_s)
        return delay

    def reset(self) -> None:
        self._base_s = self._first_s
