"""Drives one `RequestLife` in tests and keeps what came out of it."""

from __future__ import annotations

import itertools

from placement_fakes import LENGTH, delta, first_token, spec, ticket

from coordinator import life_events as ev
from coordinator.failure_reasons import FailureReason
from coordinator.life_state import State
from coordinator.placement_settings import PlacementSettings
from coordinator.request_life import RequestLife
from coordinator.routing import Fallback, NoRoute, PrefillChoice, Route, RouteKind
from wire.control import Cancel, HandoffTicket
from wire.ids import HandoffId, Incarnation, RequestId
from wire.sequence import FinishReason

P, P2, D, D2 = (Incarnation(name) for name in ("p", "p2", "d", "d2"))
NOWHERE = NoRoute(FailureReason.NO_WORKER, "no decode worker is ready")


class Driver:
    """Feeds a life and keeps what came out of it."""

    def __init__(self, life_settings: PlacementSettings | None = None, policy: str = "always", **of: object) -> None:
        numbers = itertools.count(1)
        self.spec = spec(**of)  # type: ignore[arg-type]
        self.life = RequestLife(
            self.spec,
            policy,  # type: ignore[arg-type]
            life_settings or PlacementSettings(),
            0.0,
            draw_request_id=lambda: RequestId(f"a{next(numbers)}"),
            draw_handoff_id=lambda: HandoffId(f"h{next(numbers)}"),
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
