"""What each state of a sequence's life does with each event, and where that may lead.

A pair that is missing is a fault of the worker that sent the message. Messages of an attempt that has ended do not get here:
their request id is not known any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator import life_events as ev
from coordinator.life_state import TERMINAL, State


@dataclass(frozen=True, slots=True)
class Rule:
    handler: str  # a method of RequestLife
    targets: frozenset[State] = frozenset()  # states that it may move to; it may also stay


def _build_table() -> Mapping[tuple[State, type], Rule]:
    s = State
    again = frozenset({s.PLACING, s.FAILED})
    from_tokens = again | {s.DECODING, s.FINISHED}
    table: dict[tuple[State, type], Rule] = {
        (s.PLACING, ev.Routed): Rule("_routed", frozenset({s.RESERVING, s.PREFILLING_ALONE, s.COMPUTING})),
        (s.PLACING, ev.NotRouted): Rule("_not_routed", frozenset({s.FAILED})),
        (s.PLACING, ev.Tick): Rule("_tick_placing", frozenset({s.FAILED})),
        (s.PLACING, ev.WorkerLost): Rule("_ignore"),
        (s.RESERVING, ev.Granted): Rule("_granted", again | {s.PREFILLING, s.COMPUTING}),
        (s.PREFILLING, ev.FirstDrawn): Rule("_first_drawn", from_tokens | {s.HANDING_OVER}),
        (s.PREFILLING, ev.Drawn): Rule("_hold"),
        (s.PREFILLING_ALONE, ev.FirstDrawn): Rule("_first_drawn", again | {s.FINISHED}),
        (s.HANDING_OVER, ev.Drawn): Rule("_drawn", from_tokens),
        (s.COMPUTING, ev.Drawn): Rule("_drawn", from_tokens),
        (s.DECODING, ev.Drawn): Rule("_drawn", from_tokens),
    }
    for state in (s.RESERVING, s.PREFILLING, s.PREFILLING_ALONE, s.HANDING_OVER, s.COMPUTING, s.DECODING):
        table[state, ev.AttemptFailed] = Rule("_attempt_failed", again)
        table[state, ev.WorkerBroke] = Rule("_worker_broke", again)
        table[state, ev.WorkerLost] = Rule("_worker_lost", again)
        table[state, ev.Tick] = Rule("_tick", again)
    for state in set(s) - TERMINAL:
        table[state, ev.CancelAsked] = Rule("_cancelled", frozenset({s.CANCELLED}))
        table[state, ev.ShutDown] = Rule("_shut_down", frozenset({s.FAILED}))
    for state in TERMINAL:
        for event in (ev.WorkerLost, ev.Tick, ev.CancelAsked, ev.ShutDown):
            table[state, event] = Rule("_ignore")
    return table


TABLE = _build_table()
