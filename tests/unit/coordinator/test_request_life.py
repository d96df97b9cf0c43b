"""The life of one sequence: every state meets every event, and no order of events breaks a promise."""

from __future__ import annotations

import itertools
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_fakes import delta, first_token, spec, ticket, token_at

from coordinator import life_events as ev
from coordinator.failure_reasons import FailureReason
from coordinator.generation import Placement, Timeline
from coordinator.life_state import TERMINAL, State
from coordinator.life_table import TABLE
from coordinator.placement_settings import PlacementSettings
from coordinator.request_life import RequestLife
from coordinator.routing import Fallback, NoRoute, PrefillChoice, Route, RouteKind
from wire.control import Cancel, FailureKind, Generate, HandoffTicket, Prefill, Reserve
from wire.errors import InvalidTransition
from wire.ids import HandoffId, Incarnation, RequestId
from wire.sequence import FinishReason

P, P2, D, D2 = (Incarnation(name) for name in ("p", "p2", "d", "d2"))
NOWHERE = NoRoute(FailureReason.NO_WORKER, "no decode worker is ready")
LENGTH = FinishReason.LENGTH


class Driver:
    """Feeds a life and keeps what came out of it."""

    def __init__(self, life_settings: PlacementSettings | None = None, policy: str = "always", **of: object) -> None:
        ids = itertools.count(1)
        self.spec = spec(**of)  # type: ignore[arg-type]
        self.life = RequestLife(
            self.spec,
            policy,  # type: ignore[arg-type]
            life_settings or PlacementSettings(),
            0.0,
            draw_request_id=lambda: RequestId(f"a{next(ids)}"),
            draw_handoff_id=lambda: HandoffId(f"h{next(ids)}"),
        )
        self.now = 0.0
        self.emitted: list[int] = []
        self.finish: FinishReason | None = None
        self.error: object = None
        self.open: set[RequestId] = set()
        self.sent: list[tuple[Incarnation, object]] = []
        self.notes: list[str] = []
        self.wants_route = True

    def feed(self, event: ev.Event, after: float = 0.0) -> list[ev.Action]:
        self.now += after
        actions = self.life.handle(event, self.now)
        if isinstance(event, ev.Routed | ev.NotRouted):
            self.wants_route = False
        for action in actions:
            self._carry_out(action)
        return actions

    def _carry_out(self, action: ev.Action) -> None:
        match action:
            case ev.Emit():
                assert self.finish is None
                assert self.error is None
                self.emitted += [token.token_id for token in action.tokens]
                self.finish = action.finish
            case ev.Fail():
                assert self.finish is None
                assert self.error is None
                self.error = action.error
            case ev.BeginAttempt():
                assert not self.open
                self.open.add(action.request_id)
            case ev.EndAttempt():
                self.open.remove(action.request_id)
            case ev.Send():
                self.sent.append((action.worker, action.message))
            case ev.Note():
                self.notes.append(action.what)
            case ev.AskRoute():
                self.wants_route = True

    # -- the ordinary steps

    @property
    def id(self) -> RequestId:
        assert self.life.attempt is not None
        return self.life.attempt.request_id

    def route(self, kind: RouteKind, worker: Incarnation, fallback: Fallback | None = None) -> None:
        self.feed(ev.Routed(Route(kind, worker, fallback)))

    def grant(self, prefill: Incarnation | None = P, decode: Incarnation = D) -> None:
        assert self.life.attempt is not None
        self.feed(ev.Granted(decode, self.ticket(decode), PrefillChoice(prefill)))

    def ticket(self, decode: Incarnation = D) -> HandoffTicket:
        assert self.life.attempt is not None
        return ticket(self.life.attempt.handoff or HandoffId("none"), decode)

    def first(self, worker: Incarnation = P, finish: FinishReason | None = None) -> None:
        self.feed(ev.FirstDrawn(worker, first_token(self.id, len(self.life.output), finish)))

    def tokens(self, start: int, stop: int, finish: FinishReason | None = None, worker: Incarnation = D) -> None:
        self.feed(ev.Drawn(worker, delta(self.id, start, stop, finish, stages=True)))

    def to(self, state: State) -> Driver:
        """Lead a fresh life into `state`."""
        if state is State.PREFILLING_ALONE:
            self.route(RouteKind.PREFILL_ONLY, P)
        elif state is State.COMPUTING:
            self.route(RouteKind.LOCAL, D)
        elif state is State.CANCELLED:
            self.feed(ev.CancelAsked())
        elif state is State.FAILED:
            self.feed(ev.ShutDown())
        elif state is not State.PLACING:
            self.route(RouteKind.RESERVE, D)
            if state is not State.RESERVING:
                self.grant()
            if state in (State.HANDING_OVER, State.DECODING, State.FINISHED):
                self.first()
            if state is State.DECODING:
                self.tokens(1, 2)
            if state is State.FINISHED:
                self.tokens(1, 6, LENGTH)
        assert self.life.state is state
        return self

    def cancelled(self) -> set[Incarnation]:
        return {worker for worker, message in self.sent if isinstance(message, Cancel)}

    def assert_over(self, state: State) -> None:
        assert self.life.state is state
        assert self.life.attempt is None
        assert not self.open
        assert (self.finish is None) != (self.error is None)
        assert self.life.timeline.ended_at is not None


def ids(tokens: range) -> list[int]:
    return [token_at(index).token_id for index in tokens]


# -- stories --------------------------------------------------------------------------------------------------------


def test_the_ordinary_life() -> None:
    run = Driver()
    # 1. a reservation, 2. granted: prefill, 3. the first token, 4. the rest
    run.route(RouteKind.RESERVE, D)
    run.now = 0.010
    run.grant()
    run.now = 0.050
    run.first()
    assert run.emitted == ids(range(1))
    run.tokens(1, 4)
    run.now = 0.100
    run.tokens(4, 6, LENGTH)

    assert run.emitted == ids(range(6))
    (to_d, reserve), (to_p, prefill) = run.sent
    assert (to_d, to_p) == (D, P)
    assert isinstance(reserve, Reserve)
    assert isinstance(prefill, Prefill)
    assert prefill.ticket is not None
    assert prefill.ticket.handoff_id == reserve.handoff_id
    assert reserve.spec == prefill.spec
    assert reserve.spec.request_id != run.spec.request_id
    assert run.life.placement == Placement("always", "p", "d", None)
    assert run.life.num_cached_tokens == 3
    expected = Timeline(0.0, 10.0, 1.0, 2.0, 4.0, 5.0, 6.0, 50.0, 100.0)
    got = run.life.timeline.snapshot()
    assert [getattr(got, f.name) for f in fields(got)] == pytest.approx(
        [getattr(expected, f.name) for f in fields(expected)]
    )
    run.assert_over(State.FINISHED)


def test_tokens_of_d_that_overtake_the_first_one_are_held_in_order() -> None:
    run = Driver().to(State.PREFILLING)
    run.tokens(1, 3)
    run.tokens(3, 6, LENGTH)
    assert run.emitted == []
    run.first()
    assert run.emitted == ids(range(6))
    assert run.cancelled() == set()
    run.assert_over(State.FINISHED)


def test_a_first_token_that_is_the_last_cancels_the_reservation() -> None:
    run = Driver().to(State.PREFILLING)
    run.first(finish=FinishReason.STOP)
    assert run.emitted == ids(range(1))
    assert run.cancelled() == {D}
    run.assert_over(State.FINISHED)


def test_one_token_is_prefills_alone() -> None:
    run = Driver(max_tokens=1).to(State.PREFILLING_ALONE)
    [(_, message)] = run.sent
    assert isinstance(message, Prefill)
    assert message.ticket is None
    run.first(finish=LENGTH)
    assert run.life.placement == Placement("always", "p", None, None)
    run.assert_over(State.FINISHED)


def test_decode_computes_what_routing_wants_under_the_reservations_id() -> None:
    run = Driver(policy="auto").to(State.RESERVING)
    attempt = run.id
    run.feed(ev.Granted(D, run.ticket(), PrefillChoice(None)))
    assert isinstance(run.sent[-1][1], Generate)
    assert run.sent[-1][1].spec.request_id == attempt
    run.tokens(0, 6, LENGTH)
    assert run.life.placement == Placement("auto", None, "d", None)
    assert run.life.timeline.snapshot().transfer_ms is None
    assert run.life.num_cached_tokens == 2
    run.assert_over(State.FINISHED)


def test_repeated_tokens_are_dropped_and_a_gap_is_replayed() -> None:
    run = Driver().to(State.DECODING)
    run.tokens(0, 2)
    run.tokens(1, 4)
    assert run.emitted == ids(range(4))
    attempt = run.id
    run.tokens(5, 6)
    assert run.life.state is State.PLACING
    assert (D, Cancel(attempt)) in run.sent
    run.route(RouteKind.LOCAL, D2)
    assert run.sent[-1][1].spec.resumed == tuple(ids(range(4)))  # type: ignore[attr-defined]
    run.tokens(4, 6, LENGTH, worker=D2)
    assert run.emitted == ids(range(6))
    assert run.life.placement == Placement("always", None, "d2", "decode_failed")


def test_more_tokens_than_were_asked_for_are_a_failure() -> None:
    run = Driver().to(State.DECODING)
    run.tokens(2, 7)
    assert run.life.state is State.PLACING
    assert run.emitted == ids(range(2))


def test_a_failed_prefill_goes_to_another_prefill_worker_then_to_decode() -> None:
    run = Driver(PlacementSettings(max_attempts=2)).to(State.PREFILLING)
    old = run.id
    run.feed(ev.WorkerLost(P, "died"))
    assert run.sent[-1] == (D, Cancel(old))  # the old reservation first; nothing to the dead
    assert run.life.route_request().exclude_prefill == {P}
    assert not run.life.route_request().local_only
    run.route(RouteKind.RESERVE, D)
    assert run.id != old
    run.grant(P2)
    run.feed(ev.AttemptFailed(P2, FailureKind.INTERNAL, "boom"))
    assert run.life.route_request().local_only
    run.route(RouteKind.LOCAL, D)
    run.tokens(0, 6, LENGTH)
    assert run.emitted == ids(range(6))
    assert run.life.placement == Placement("always", None, "d", "prefill_failed")
    assert run.notes.count("prefill_failed") == 2


@pytest.mark.parametrize("mode", ["local", "fail"])
def test_the_other_answers_to_a_failed_prefill(mode: str) -> None:
    run = Driver(PlacementSettings(prefill_failure=mode)).to(State.PREFILLING)  # type: ignore[arg-type]
    run.feed(ev.AttemptFailed(P, FailureKind.OVERLOADED, "full"))
    if mode == "local":
        assert run.life.route_request().local_only
        assert run.wants_route
    else:
        assert run.error.code == "prefill_failed"  # type: ignore[attr-defined]
        run.assert_over(State.FAILED)
    assert run.cancelled() == {D}


@pytest.mark.parametrize("state", [State.PREFILLING, State.HANDING_OVER])
@pytest.mark.parametrize("reporter", [P, D])
def test_a_failed_transfer_is_recomputed_on_decode(state: State, reporter: Incarnation) -> None:
    run = Driver().to(state)
    run.feed(ev.AttemptFailed(reporter, FailureKind.TRANSFER, "checksum"))
    assert run.cancelled() == {P, D} - {reporter}
    assert run.life.route_request().local_only
    run.route(RouteKind.LOCAL, D)
    have = len(run.emitted)
    assert run.sent[-1][1].spec.resumed == tuple(ids(range(have)))  # type: ignore[attr-defined]
    run.tokens(have, 6, LENGTH)
    assert run.emitted == ids(range(6))
    assert run.life.placement == Placement("always", None, "d", "transfer_failed")
    assert run.notes.count("recompute") == 1


def test_prefill_may_die_behind_the_first_token_and_decode_knows_whether_all_came() -> None:
    run = Driver().to(State.HANDING_OVER)
    run.feed(ev.WorkerLost(P, "died"))
    assert run.life.state is State.HANDING_OVER
    run.tokens(1, 6, LENGTH)
    assert run.emitted == ids(range(6))
    run.assert_over(State.FINISHED)


def test_decode_dies_again_and_again() -> None:
    run = Driver(PlacementSettings(max_replays=2)).to(State.DECODING)
    for have in (2, 3):
        run.feed(ev.WorkerLost(D, "died"))
        request = run.life.route_request()
        assert (request.num_tokens, request.remaining) == (8 + have, 6 - have)
        assert request.avoid_decode == {D}
        run.route(RouteKind.RESERVE, D)
        assert run.sent[-1][1].spec.resumed == tuple(ids(range(have)))  # type: ignore[attr-defined]
        run.grant()
        run.first()
    run.feed(ev.WorkerLost(D, "died"))
    assert run.emitted == ids(range(4))
    assert run.error.status == 503  # type: ignore[attr-defined]
    assert run.error.retry_after_s == 1  # type: ignore[attr-defined]
    assert run.notes.count("replay") == 2
    run.assert_over(State.FAILED)


def test_a_replay_waits_for_a_worker_but_not_for_ever() -> None:
    for comes in (True, False):
        run = Driver(PlacementSettings(failover_wait_s=5.0)).to(State.DECODING)
        run.feed(ev.WorkerLost(D, "died"))
        run.feed(ev.NotRouted(NOWHERE))
        run.feed(ev.Tick(), after=4.9)
        assert run.wants_route
        if comes:
            run.route(RouteKind.LOCAL, D2)
            run.tokens(2, 6, LENGTH, worker=D2)
            run.assert_over(State.FINISHED)
        else:
            run.feed(ev.NotRouted(NOWHERE))
            run.feed(ev.Tick(), after=0.1)
            assert run.error.code == "worker_failed"  # type: ignore[attr-defined]
            run.assert_over(State.FAILED)


def test_nothing_there_at_first_is_said_at_once() -> None:
    run = Driver()
    run.feed(ev.NotRouted(NOWHERE))
    assert (run.error.status, run.error.code) == (503, "no_worker")  # type: ignore[attr-defined]
    run.assert_over(State.FAILED)


def test_a_full_decode_worker_is_tried_past_once() -> None:
    for second in ("elsewhere", "nowhere"):
        run = Driver().to(State.RESERVING)
        run.feed(ev.AttemptFailed(D, FailureKind.OVERLOADED, "no room"))
        assert run.life.route_request().exclude_decode == {D}
        if second == "nowhere":
            run.feed(ev.NotRouted(NOWHERE))
        else:
            run.route(RouteKind.RESERVE, D2)
            run.feed(ev.AttemptFailed(D2, FailureKind.OVERLOADED, "no room"))
        assert (run.error.status, run.error.code, run.error.retry_after_s) == (503, "overloaded", 1)  # type: ignore[attr-defined]
        run.assert_over(State.FAILED)


def test_a_draining_decode_worker_is_left_alone() -> None:
    run = Driver().to(State.RESERVING)
    run.feed(ev.AttemptFailed(D, FailureKind.DRAINING, "draining"))
    assert run.life.route_request().exclude_decode == {D}
    run.route(RouteKind.RESERVE, D2)
    run.feed(ev.AttemptFailed(D2, FailureKind.OVERLOADED, "no room"))
    assert run.wants_route  # the first refusal for want of room


def test_an_invalid_request_is_never_tried_again() -> None:
    run = Driver().to(State.PREFILLING)
    run.feed(ev.AttemptFailed(P, FailureKind.INVALID, "token 7 is out of range"))
    assert (run.error.status, run.error.type) == (400, "invalid_request_error")  # type: ignore[attr-defined]
    assert run.cancelled() == {D}
    run.assert_over(State.FAILED)


@pytest.mark.parametrize(
    ("state", "timeout_s", "then"),
    [
        (State.RESERVING, 30.0, State.FAILED),
        (State.PREFILLING, 120.0, State.PLACING),
        (State.PREFILLING_ALONE, 120.0, State.PLACING),
        (State.HANDING_OVER, 30.0, State.PLACING),
        (State.COMPUTING, 120.0, State.PLACING),
        (State.DECODING, 60.0, State.PLACING),
    ],
)
def test_every_wait_has_a_deadline(state: State, timeout_s: float, then: State) -> None:
    run = Driver().to(state)
    held = set(run.life.attempt.holders)  # type: ignore[union-attr]
    assert run.feed(ev.Tick(), after=timeout_s - 0.01) == []
    run.feed(ev.Tick(), after=0.02)
    assert run.life.state is then
    assert run.cancelled() == held


def test_tokens_put_the_stall_deadline_off() -> None:
    run = Driver().to(State.DECODING)
    for index in (2, 3, 4):
        run.now += 50.0
        run.tokens(index, index + 1)
        run.feed(ev.Tick())
    assert run.life.state is State.DECODING


def test_a_ticket_for_another_hand_off_is_not_passed_on() -> None:
    run = Driver().to(State.RESERVING)
    run.feed(ev.Granted(D, ticket(HandoffId("stale"), D), PrefillChoice(P)))
    assert run.life.state is State.PLACING
    assert not any(isinstance(message, Prefill) for _, message in run.sent)


@pytest.mark.parametrize("state", list(State))
def test_cancel_is_allowed_everywhere_and_reaches_whoever_may_hold_something(state: State) -> None:
    run = Driver().to(state)
    before = run.life.state
    run.sent.clear()
    held = set(run.life.attempt.holders) if run.life.attempt else set()
    run.feed(ev.CancelAsked())
    assert run.life.state is (before if before in TERMINAL else State.CANCELLED)
    assert run.cancelled() == held
    assert run.feed(ev.CancelAsked()) == []
    run.assert_over(run.life.state)


# -- all of it --------------------------------------------------------------------------------------------------------


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
        assert run.emitted == ids(range(len(run.emitted)))
        assert run.emitted == run.life.output
    if not run.life.is_over:
        run.feed(ev.CancelAsked())
    run.assert_over(run.life.state)
    if run.life.state is State.FINISHED:
        assert len(run.emitted) == run.spec.stop.max_tokens
    for worker, message in run.sent:
        if isinstance(message, Cancel):
            assert (message.request_id, worker) not in lost  # ids of workers that died are skipped
