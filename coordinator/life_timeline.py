"""The stages of one sequence, gathered while it lives."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.generation import Timeline
from wire.control import DecodeStages, PrefillStages


@dataclass(slots=True)
class LifeTimeline:
    """Moments are of the coordinator's monotonic clock; stages come from the workers as durations. After a retry the last
    attempt's stages count, up to the first token; a replay changes none of them."""

    accepted_at: float
    routed_at: float | None = None
    reserve_sent_at: float | None = None
    reserved_at: float | None = None
    prefill: PrefillStages | None = None
    decode: DecodeStages | None = None
    handed_over: bool = False
    first_token_at: float | None = None
    ended_at: float | None = None

    def begin_attempt(self, now: float) -> None:
        if self.routed_at is None:
            self.routed_at = now
        if self.first_token_at is None:
            self.reserve_sent_at = self.reserved_at = None

    def reserve_sent(self, now: float) -> None:
        if self.first_token_at is None:
            self.reserve_sent_at = now

    def reserved(self, now: float) -> None:
        if self.first_token_at is None:
            self.reserved_at = now

    def snapshot(self) -> Timeline:
        prefill, decode = self.prefill, self.decode
        return Timeline(
            route_ms=_ms(self.accepted_at, self.routed_at) or 0.0,
            reserve_ms=_ms(self.reserve_sent_at, self.reserved_at),
            prefill_queue_ms=prefill.queue_s * 1e3 if prefill else None,
            prefill_ms=prefill.prefill_s * 1e3 if prefill else None,
            transfer_ms=decode.transfer_s * 1e3 if decode and self.handed_over else None,
            decode_queue_ms=decode.queue_s * 1e3 if decode else None,
            first_step_ms=decode.first_step_s * 1e3 if decode else None,
            first_token_ms=_ms(self.accepted_at, self.first_token_at),
            total_ms=_ms(self.accepted_at, self.ended_at),
        )


def _ms(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else (end - start) * 1e3
