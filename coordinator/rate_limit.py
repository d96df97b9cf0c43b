"""Token buckets: so many requests a minute for each client, and a burst on top of an idle time."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_IDLE_BUCKETS = 4096


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at: float  # when it held that many


class RateLimit:
    """Sans-IO; `now` is in monotonic seconds.

    Args:
        per_minute: 0: no limit.
        burst: requests that a client who has been idle may send at once.
    """

    def __init__(self, per_minute: float, burst: int) -> None:
        self._per_s = per_minute / 60
        self._burst = burst
        self._buckets: dict[str, _Bucket] = {}

    def take(self, client: str, now: float) -> float:
        """0 and one token is gone; or the seconds until there is one again, and none is taken."""
        if self._per_s <= 0:
            return 0.0
        bucket = self._buckets.get(client)
        if bucket is None:
            self._forget_full(now)
            bucket = self._buckets[client] = _Bucket(float(self._burst), now)
        tokens = self._level(bucket, now)
        if tokens < 1:
            return (1 - tokens) / self._per_s
        bucket.tokens, bucket.at = tokens - 1, now
        return 0.0

    def _level(self, bucket: _Bucket, now: float) -> float:
        return min(float(self._burst), bucket.tokens + (now - bucket.at) * self._per_s)

    def _forget_full(self, now: float) -> None:
        """A full bucket is what a new client gets: it need not be remembered."""
        if len(self._buckets) >= _MAX_IDLE_BUCKETS:
            self._buckets = {name: kept for name, kept in self._buckets.items() if self._level(kept, now) < self._burst}
