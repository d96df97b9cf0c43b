"""Is the peer alive, and does it know that we are? Time is passed in.

Both ends send something at least every third of the smaller liveness; any traffic counts. A peer that was silent for
`liveness_s` is dead. A late look at the clock is this process' own stall (the frames may wait unread) and is forgiven.
"""

from __future__ import annotations

from enum import Enum, auto

_PULSES_PER_LIVENESS = 3


class Verdict(Enum):
    FINE = auto()
    PULSE = auto()  # send a sign of life
    DEAD = auto()


class Liveness:
    def __init__(self, own_liveness_s: float, peer_liveness_s: float, now: float) -> None:
        self.interval_s = min(own_liveness_s, peer_liveness_s) / _PULSES_PER_LIVENESS
        self.liveness_s = own_liveness_s
        self._heard = now
        self._sent = now
        self._next_look = now + self.interval_s

    def heard(self, now: float) -> None:
        self._heard = now

    def sent(self, now: float) -> None:
        self._sent = now

    def look(self, now: float) -> Verdict:
        """To be called every half `interval_s`."""
        stalled_s = now - self._next_look
        if stalled_s > self.interval_s:
            self._heard = min(now, self._heard + stalled_s)
        self._next_look = now + self.interval_s / 2
        if now - self._heard >= self.liveness_s:
            return Verdict.DEAD
        if now - self._sent >= self.interval_s / 2:
            return Verdict.PULSE
        return Verdict.FINE
