"""What has failed under one sequence so far, and whether it may be tried again, where, and how often."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.failure_reasons import FailureReason
from coordinator.placement_settings import PlacementSettings
from coordinator.routing import Fallback
from wire.ids import Incarnation


@dataclass(frozen=True, slots=True)
class GiveUp:
    reason: FailureReason
    message: str


@dataclass(slots=True)
class Retries:
    """Each method takes one failure and says whether that was the last: None means place it again."""

    settings: PlacementSettings
    replays: int = 0
    failed_prefill: set[Incarnation] = field(default_factory=set)
    failed_decode: set[Incarnation] = field(default_factory=set)  # may be tried again, if nobody else is there
    closed_decode: set[Incarnation] = field(default_factory=set)  # full or draining
    fallback: Fallback | None = None
    if_nowhere: GiveUp | None = None  # the error when no other worker is there now; None: wait for one
    _full_once: bool = False
    _prefill_given_up: bool = False
    _transfer_given_up: bool = False

    @property
    def local_only(self) -> bool:
        return self._prefill_given_up or self._transfer_given_up

    def prefill_failed(self, worker: Incarnation, message: str) -> GiveUp | None:
        """`retry`: another prefill worker, then the decode worker."""
        self.failed_prefill.add(worker)
        mode = self.settings.prefill_failure
        if mode == "fail":
            return GiveUp(FailureReason.PREFILL_FAILED, f"prefill failed: {message}")
        self._prefill_given_up = mode == "local" or len(self.failed_prefill) >= self.settings.max_attempts
        self.fallback = Fallback.PREFILL_FAILED
        return None

    def transfer_failed(self) -> None:
        """The decode worker computes the prompt itself: that cannot fail by a transfer again."""
        self._transfer_given_up = True
        self.fallback = Fallback.TRANSFER_FAILED

    def decode_full(self, worker: Incarnation, message: str) -> GiveUp | None:
        """One other decode worker may have room."""
        full = GiveUp(FailureReason.OVERLOADED, message)
        if self._full_once:
            return full
        self._full_once = True
        self.closed_decode.add(worker)
        self.if_nowhere = full
        return None

    def decode_failed(self, worker: Incarnation, message: str, draining: bool = False) -> GiveUp | None:
        self.if_nowhere = None
        self._transfer_given_up = False  # it was a transfer to the worker that has now failed
        (self.closed_decode if draining else self.failed_decode).add(worker)
        if self.replays >= self.settings.max_replays:
            return GiveUp(FailureReason.WORKER_FAILED, f"given up after {self.replays} replays; the last failure: {message}")
        self.replays += 1
        self.fallback = Fallback.DECODE_FAILED
        return None
