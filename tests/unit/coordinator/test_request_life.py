"""The life of one sequence, in stories."""

from __future__ import annotations

from dataclasses import fields

import pytest
from life_driver import D2, NOWHERE, P2, D, Driver, P
from placement_fakes import LENGTH, ticket, token_ids

from coordinator import life_events as ev
from coordinator.generation import Placement, Timeline
from coordinator.life_state import TERMINAL, State
from coordinator.placement_settings import PlacementSettings
from coordinator.routing import PrefillChoice, RouteKind
from wire.control import Cancel, FailureKind, Generate, Prefill, Reserve
from wire.ids import HandoffId, Incarnation
from wire.sequence import FinishReason


def test_the_ordinary_life() -> None:
    run = Driver()
    # 1. a reservation, 2. granted: prefill, 3. the first token, 4. the rest
    run.route(RouteKind.RESERVE, D)
    run.now = 0.010
    run.grant()
    run.now = 0.050
    run.first()
    assert run.emitted == token_ids(1)
    run.tokens(1, 4)
    run.now = 0.100
    run.tokens(4, 6, LENGTH)

    assert run.emitted == token_ids(6)
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
    assert run.emitted == token_ids(6)
    assert run.cancelled() == set()
    run.assert_over(State.FINISHED)


def test_a_first_token_that_is_the_last_cancels_the_reservation() -> None:
    run = Driver().to(State.PREFILLING)
    run.first(finish=FinishReason.STOP)
    assert run.emitted == token_ids(1)
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
    assert run.emitted == token_ids(4)
    attempt = run.id
    run.tokens(5, 6)
    assert run.life.state is State.PLACING
    assert (D, Cancel(attempt)) in run.sent
    run.route(RouteKind.LOCAL, D2)
    assert run.sent[-1][1].spec.resumed == tuple(token_ids(4))  # type: ignore[attr-defined]
    run.tokens(4, 6, LENGTH, worker=D2)
    assert run.emitted == token_ids(6)
    assert run.life.placement == Placement("always", None, "d2", "decode_failed")


def test_more_tokens_than_were_asked_for_are_a_failure() -> None:
    run = Driver().to(State.DECODING)
    run.tokens(2, 7)
    assert run.life.state is State.PLACING
    assert run.emitted == token_ids(2)


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
    assert run.emitted == token_ids(6)
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


@pytest.mark.parametrize(("state", "reporter"), [(State.PREFILLING, P), (State.HANDING_OVER, P), (State.HANDING_OVER, D)])
def test_a_failed_transfer_is_recomputed_on_decode(state: State, reporter: Incarnation) -> None:
    run = Driver().to(state)
    run.feed(ev.AttemptFailed(reporter, FailureKind.TRANSFER, "checksum"))
    assert run.cancelled() == {P, D} - {reporter}
    assert run.life.route_request().local_only
    run.route(RouteKind.LOCAL, D)
    have = len(run.emitted)
    assert run.sent[-1][1].spec.resumed == tuple(token_ids(have))  # type: ignore[attr-defined]
    run.tokens(have, 6, LENGTH)
    assert run.emitted == token_ids(6)
    assert run.life.placement == Placement("always", None, "d", "transfer_failed")
    assert run.notes.count("recompute") == 1


def test_decode_sees_prefill_die_before_the_coordinator_does() -> None:
    """No first token is there: another prefill worker computes it, and the death itself comes too late to count again."""
    run = Driver().to(State.PREFILLING)
    run.feed(ev.AttemptFailed(D, FailureKind.TRANSFER, "the prefill worker is dead"))
    assert run.cancelled() == {P}
    request = run.life.route_request()
    assert not request.local_only
    assert request.exclude_prefill == {P}
    run.route(RouteKind.RESERVE, D)
    run.feed(ev.WorkerLost(P, "died"))
    run.grant(P2)
    run.first(P2)
    run.tokens(1, 6, LENGTH)
    assert run.emitted == token_ids(6)
    assert run.life.placement == Placement("always", "p2", "d", "prefill_failed")
    assert run.notes.count("prefill_failed") == 1


def test_prefill_may_die_behind_the_first_token_and_decode_knows_whether_all_came() -> None:
    run = Driver().to(State.HANDING_OVER)
    run.feed(ev.WorkerLost(P, "died"))
    assert run.life.state is State.HANDING_OVER
    run.tokens(1, 6, LENGTH)
    assert run.emitted == token_ids(6)
    run.assert_over(State.FINISHED)


def test_decode_dies_again_and_again() -> None:
    run = Driver(PlacementSettings(max_replays=2)).to(State.DECODING)
    for have in (2, 3):
        run.feed(ev.WorkerLost(D, "died"))
        request = run.life.route_request()
        assert (request.num_tokens, request.remaining) == (8 + have, 6 - have)
        assert request.avoid_decode == {D}
        run.route(RouteKind.RESERVE, D)
        assert run.sent[-1][1].spec.resumed == tuple(token_ids(have))  # type: ignore[attr-defined]
        run.grant()
        run.first()
    run.feed(ev.WorkerLost(D, "died"))
    assert run.emitted == token_ids(4)
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
