"""The life of one sequence: every state meets every event, and no order of events breaks a promise."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from life_driver import D2, NOWHERE, P2, D, Driver, P
from placement_fakes import LENGTH, delta, first_token, ticket, token_ids

from coordinator import life_events as ev
from coordinator.life_state import TERMINAL, State
from coordinator.life_table import TABLE
from coordinator.request_life import RequestLife
from coordinator.routing import Fallback, PrefillChoice, Route, RouteKind
from wire.control import Cancel, FailureKind
from wire.errors import InvalidTransition
from wire.ids import HandoffId, Incarnation, RequestId


def every_event(run: Driver) -> list[ev.Event]:
    attempt = run.life.attempt
    request = attempt.request_id if attempt else RequestId("none")
    have = len(run.life.output)
    grant = ticket((attempt and attempt.handoff) or HandoffId("none"), D)
    events: list[ev.Event] = [
        ev.Routed(Route(RouteKind.RESERVE, D)),
        ev.Routed(Route(RouteKind.LOCAL, D)),
        ev.Routed(Route(RouteKind.PREFILL_ONLY, P)),
        ev.NotRouted(NOWHERE),
        ev.Tick(),
        ev.CancelAsked(),
        ev.ShutDown(),
        ev.Granted(D, grant, PrefillChoice(P)),
        ev.Granted(D, grant, PrefillChoice(None, Fallback.NO_PREFILL)),
    ]
    for worker in (P, D, P2):
        events += [ev.AttemptFailed(worker, kind, "why") for kind in FailureKind]
        events += [ev.WorkerLost(worker, "died"), ev.WorkerBroke(worker, "nonsense")]
        events += [ev.FirstDrawn(worker, first_token(request, have, finish)) for finish in (None, LENGTH)]
        for start, stop, finish in (
            (have, have + 1, None),
            (have + 1, have + 2, None),
            (0, have, None),
            (have, have, LENGTH),
        ):
            events.append(ev.Drawn(worker, delta(request, start, stop, finish)))
    return events


@pytest.mark.parametrize("state", list(State))
def test_every_event_in_every_state_either_follows_the_table_or_changes_nothing(state: State) -> None:
    for number in range(len(every_event(Driver().to(state)))):
        run = Driver().to(state)
        event = every_event(run)[number]
        rule = TABLE.get((state, type(event)))
        if rule is None:
            with pytest.raises(InvalidTransition) as raised:
                run.feed(event)
            assert raised.value.history[-1] == state.value
            assert run.life.state is state
            continue
        after = {State.PREFILLING: {State.HANDING_OVER}}.get(state, set()) | {state}
        run.feed(event)
        assert run.life.state in rule.targets | after, event
        assert (run.life.attempt is None) == (run.life.state in TERMINAL | {State.PLACING})
        assert run.open == (set() if run.life.attempt is None else {run.id})
        if run.life.is_over:
            run.assert_over(run.life.state)


def test_the_table_names_methods_and_workers_faults_are_all_that_is_missing() -> None:
    assert {rule.handler for rule in TABLE.values()} <= set(vars(RequestLife))
    missing = {(s, e) for s in State for e in (ev.WorkerLost, ev.Tick, ev.CancelAsked, ev.ShutDown)} - set(TABLE)
    assert missing == set()


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_whatever_happens_tokens_come_in_order_and_there_is_one_end(data: st.DataObject) -> None:
    """Workers die, fail, stall, repeat and overtake each other at random; what they send is true to the protocol."""
    run = Driver(max_tokens=data.draw(st.integers(1, 6)))
    lost: set[tuple[RequestId, Incarnation]] = set()
    for _ in range(200):
        life = run.life
        if life.is_over:
            break
        attempt = life.attempt
        have, limit = len(life.output), run.spec.stop.max_tokens
        choices: list[ev.Event] = [ev.Tick()]
        if life.state is State.PLACING:
            kinds = [RouteKind.PREFILL_ONLY] if limit - have == 1 else [RouteKind.RESERVE, RouteKind.LOCAL]
            choices += [ev.NotRouted(NOWHERE)] + [
                ev.Routed(Route(kind, worker))
                for kind in kinds
                for worker in ((P, P2) if kind is RouteKind.PREFILL_ONLY else (D, D2))
            ]
        elif attempt is not None:
            request = attempt.request_id
            for worker in (P, D, P2, D2):
                choices += [ev.WorkerLost(worker, "died")]
                choices += [ev.AttemptFailed(worker, kind, "why") for kind in FailureKind if kind is not FailureKind.INVALID]
            if life.state is State.RESERVING:
                assert attempt.decode is not None
                for choice in (PrefillChoice(P), PrefillChoice(P2), PrefillChoice(None)):
                    choices.append(ev.Granted(attempt.decode, run.ticket(attempt.decode), choice))
            if life.state in (State.PREFILLING, State.PREFILLING_ALONE) and attempt.prefill is not None:
                last = LENGTH if have + 1 == limit else None
                choices.append(ev.FirstDrawn(attempt.prefill, first_token(request, have, last)))
            if attempt.decode is not None and life.state not in (State.RESERVING, State.PREFILLING_ALONE):
                held = sum(len(d.tokens) for d in attempt.held)
                start = have + (1 + held if life.state is State.PREFILLING else 0)
                if start < limit and not any(d.finish for d in attempt.held):
                    stop = data.draw(st.integers(start + 1, limit))
                    back = data.draw(st.integers(0, 1)) if start > have else 0
                    choices.append(
                        ev.Drawn(attempt.decode, delta(request, start - back, stop, LENGTH if stop == limit else None))
                    )
        event = data.draw(st.sampled_from(choices))
        if isinstance(event, ev.WorkerLost) and attempt is not None and event.worker in attempt.holders:
            lost.add((attempt.request_id, event.worker))
        run.feed(event, after=data.draw(st.sampled_from([0.0, 0.1, 31.0])))
        assert run.emitted == token_ids(len(run.emitted))
        assert run.emitted == run.life.output
    if not run.life.is_over:
        run.feed(ev.CancelAsked())
    run.assert_over(run.life.state)
    if run.life.state is State.FINISHED:
        assert len(run.emitted) == run.spec.stop.max_tokens
    for worker, message in run.sent:
        if isinstance(message, Cancel):
            assert (message.request_id, worker) not in lost  # ids of workers that died are skipped
