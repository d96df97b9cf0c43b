"""What the coordinator itself has given each worker to do, and how much of it the last heartbeat already counts.

Heartbeats lag: a burst that is placed between two of them would land on one worker if their load alone decided. So

    predicted = load of the last heartbeat - what ended since then + what it cannot have counted yet

in tokens for a prefill worker and in blocks for a decode worker. Nothing is counted twice: an entry moves from `unseen` to
the heartbeat's own number once the heartbeat must include it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wire.ids import Incarnation, RequestId

_TRANSIT_S = 0.02
"""A message sent less than this before a heartbeat arrived may have passed it on the way."""


@dataclass(slots=True)
class _Entry:
    amount: int
    sent_at: float
    needs_answer: bool
    answered: bool = False
    seen: bool = False


@dataclass(slots=True)
class _Worker:
    entries: dict[RequestId, _Entry] = field(default_factory=dict)
    unseen: int = 0
    ended_since: int = 0
    last_serial: int = 0


@dataclass(frozen=True, slots=True)
class Outstanding:
    """Of one worker. `last_serial` grows with each assignment in the cluster: the smallest was served longest ago."""

    sequences: int = 0
    unseen: int = 0
    ended_since: int = 0
    last_serial: int = 0

    def predicted(self, reported: int) -> int:
        """What the worker has to carry now, given what its last heartbeat reported."""
        return max(0, reported - self.ended_since) + self.unseen


class Assignments:
    def __init__(self) -> None:
        self._workers: dict[Incarnation, _Worker] = {}
        self._serial = 0

    def assign(self, worker: Incarnation, request_id: RequestId, amount: int, now: float, needs_answer: bool) -> None:
        """
        Args:
            needs_answer: the worker carries it only from its first answer on (a queued reservation holds no blocks);
                otherwise from its arrival on.
        """
        self._serial += 1
        state = self._workers.setdefault(worker, _Worker())
        state.last_serial = self._serial
        if request_id not in state.entries:
            state.entries[request_id] = _Entry(amount, now, needs_answer)
            state.unseen += amount

    def answered(self, worker: Incarnation, request_id: RequestId) -> None:
        state = self._workers.get(worker)
        if state is not None and (entry := state.entries.get(request_id)) is not None:
            entry.answered = True

    def end(self, worker: Incarnation, request_id: RequestId) -> None:
        """The worker has nothing more to do for this request; unknown pairs are ignored."""
        state = self._workers.get(worker)
        entry = state.entries.pop(request_id, None) if state is not None else None
        if state is None or entry is None:
            return
        if entry.seen:
            state.ended_since += entry.amount
        else:
            state.unseen -= entry.amount

    def heartbeat(self, worker: Incarnation, now: float) -> None:
        """A heartbeat came in: what it must have counted is from now on left to it."""
        state = self._workers.get(worker)
        if state is None:
            return
        state.ended_since = 0
        for entry in state.entries.values():
            if not entry.seen and (entry.answered if entry.needs_answer else entry.sent_at <= now - _TRANSIT_S):
                entry.seen = True
                state.unseen -= entry.amount

    def forget(self, worker: Incarnation) -> None:
        self._workers.pop(worker, None)

    def of(self, worker: Incarnation) -> Outstanding:
        state = self._workers.get(worker)
        if state is None:
            return Outstanding()
        return Outstanding(len(state.entries), state.unseen, state.ended_since, state.last_serial)

    def is_empty(self) -> bool:
        """No worker has anything outstanding."""
        return not any(state.entries for state in self._workers.values())
