"""How many generating requests are let in, and how many of them may wait for their first token."""

from __future__ import annotations

import math

from coordinator.api.errors import ApiError
from coordinator.rate_limit import RateLimit


class Place:
    """One request's. Whoever took it must call `end`."""

    def __init__(self, door: Admission) -> None:
        self._door = door
        self._waits = True
        self._over = False

    def began(self) -> None:
        """Its first token is there: it waits no more."""
        if self._waits:
            self._waits = False
            self._door.num_waiting -= 1

    def end(self) -> None:
        self.began()
        if not self._over:
            self._over = True
            self._door.num_held -= 1


class Admission:
    """Refuses promptly instead of queueing for ever.

    Args:
        max_in_flight: generating requests at once.
        max_waiting: of those, the ones without a first token.
    """

    def __init__(self, max_in_flight: int, max_waiting: int, rate: RateLimit, retry_after_s: int) -> None:
        self._max_in_flight = max_in_flight
        self._max_waiting = max_waiting
        self._rate = rate
        self._retry_after_s = retry_after_s
        self.num_held = 0
        self.num_waiting = 0

    def take(self, client: str, now: float) -> Place:
        """
        Raises:
            ApiError: 429 with Retry-After and a code that says which limit.
        """
        if self.num_held >= self._max_in_flight:
            raise _busy(f"The server is serving {self._max_in_flight} requests already", "server_busy", self._retry_after_s)
        if self.num_waiting >= self._max_waiting:
            raise _busy(f"{self._max_waiting} requests are waiting already", "queue_full", self._retry_after_s)
        wait_s = self._rate.take(client, now)
        if wait_s > 0:
            raise _busy("This client sends requests faster than it may", "rate_limit_exceeded", math.ceil(wait_s))
        self.num_held += 1
        self.num_waiting += 1
        return Place(self)


def _busy(message: str, code: str, retry_after_s: int) -> ApiError:
    return ApiError(
        429,
        f"{message}; try again later.",
        type_="rate_limit_error",
        code=code,
        headers={"Retry-After": str(max(1, retry_after_s))},
    )
