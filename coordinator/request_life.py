"""The life of one sequence: what follows from each thing that happens to it. No I/O, time passed in.

    PLACING ─▶ RESERVING ─▶ PREFILLING ─▶ HANDING_OVER ─▶ DECODING ─▶ FINISHED
       │           └──▶ COMPUTING ─────────────────────────▶┘           FAILED
       ├─▶ COMPUTING (D alone)                                           CANCELLED
       └─▶ PREFILLING_ALONE (P alone: one token is all) ────────────▶ FINISHED

Every failure leads back to PLACING, with what the client already has in `resumed`, or to FAILED. Each try is an attempt with
a request id of its own on the wire, so that late messages of an earlier one can never be mistaken for it.

D's tokens come by another channel than P's first one and may overtake it: they are held until the first is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from coordinator import life_events as ev
from coordinator.failure_reasons import FailureReason, generation_error
from coordinator.generation import Placement, Policy
from coordinator.life_state import TERMINAL, Attempt, State, spec_of_attempt
from coordinator.life_table import TABLE
from coordinator.life_timeline import LifeTimeline
from coordinator.placement_settings import PlacementSettings
from coordinator.retries import GiveUp, Retries
from coordinator.routing import RouteKind, RouteRequest
from wire.control import Cancel, FailureKind, Generate, Prefill, Reserve, TokenDelta
from wire.errors import InvalidTransition
from wire.ids import HandoffId, Incarnation, RequestId, new_handoff_id, new_request_id
from wire.sequence import FinishReason, SampledToken, SequenceSpec

_NEVER = float("inf")


class RequestLife:
    """Feed it events with `handle`, in the order in which they happen; carry out the actions in theirs. Begins with one
    question for a route (`AskRoute`), which whoever makes it answers."""

    def __init__(
        self,
        spec: SequenceSpec,
        policy: Policy,
        settings: PlacementSettings,
        now: float,
        name_of: Callable[[Incarnation], str] = str,
        draw_request_id: Callable[[], RequestId] = new_request_id,
        draw_handoff_id: Callable[[], HandoffId] = new_handoff_id,
    ) -> None:
        self.spec = spec
        self.policy: Policy = policy
        self.state = State.PLACING
        self.placement: Placement | None = None
        self.timeline = LifeTimeline(now)
        self.num_cached_tokens = 0
        self.output: list[int] = list(spec.resumed)  # token ids that the client has
        self.attempt: Attempt | None = None  # None in PLACING and at the end
        self.retries = Retries(settings)
        self._settings = settings
        self._name_of = name_of
        self._draw_request_id = draw_request_id
        self._draw_handoff_id = draw_handoff_id
        self._history: deque[str] = deque([self.state.value], maxlen=32)
        self._deadline = _NEVER
        self._now = now
        self._actions: list[ev.Action] = []
        self._targets: frozenset[State] = frozenset()

    def handle(self, event: ev.Event, now: float) -> list[ev.Action]:
        """
        Raises:
            InvalidTransition: a worker sent what this state does not allow; nothing has changed.
        """
        rule = TABLE.get((self.state, type(event)))
        if rule is None:
            raise InvalidTransition("request life", self.state.value, type(event).__name__, tuple(self._history))
        self._now, self._targets, self._actions = now, rule.targets, []
        getattr(self, rule.handler)(event)
        return self._actions

    def route_request(self) -> RouteRequest:
        """The sequence's shape as routing sees it now."""
        retries, settings = self.retries, self._settings
        return RouteRequest(
            policy=self.policy,
            num_tokens=len(self.spec.prompt) + len(self.output),
            remaining=self.spec.stop.max_tokens - len(self.output),
            auto_min_prefill_tokens=settings.auto_min_prefill_tokens,
            no_prefill="local" if retries.failed_prefill else settings.no_prefill,
            local_only=retries.local_only,
            exclude_prefill=frozenset(retries.failed_prefill),
            exclude_decode=frozenset(retries.closed_decode),
            avoid_decode=frozenset(retries.failed_decode),
        )

    @property
    def is_over(self) -> bool:
        return self.state in TERMINAL

    # -- placing ------------------------------------------------------------------------------------------------------

    def _routed(self, event: ev.Event) -> None:
        assert isinstance(event, ev.Routed)
        route, timeline = event.route, self.timeline
        self.retries.fallback = self.retries.fallback or route.fallback
        timeline.begin_attempt(self._now)
        self.attempt = attempt = Attempt(self._draw_request_id())
        self._actions.append(ev.BeginAttempt(attempt.request_id))
        if route.kind is RouteKind.PREFILL_ONLY:
            self._begin_prefill(State.PREFILLING_ALONE, route.worker, Prefill(self._attempt_spec(), None))
        elif route.kind is RouteKind.RESERVE:
            attempt.decode, attempt.handoff = route.worker, self._draw_handoff_id()
            timeline.reserve_sent(self._now)
            self._send(route.worker, Reserve(self._attempt_spec(), attempt.handoff, self._settings.handoff_lease_s))
            self._move(State.RESERVING, self._settings.reserve_timeout_s)
        else:
            attempt.decode = route.worker
            self._compute_on_decode()

    def _not_routed(self, event: ev.Event) -> None:
        assert isinstance(event, ev.NotRouted)
        if self.retries.if_nowhere is not None:
            self._fail(self.retries.if_nowhere)
        elif self._deadline == _NEVER:  # nothing has failed yet: say so now
            self._fail(GiveUp(event.why.reason, event.why.message))

    def _tick_placing(self, event: ev.Event) -> None:
        if self._now >= self._deadline:
            wait = f"{self._settings.failover_wait_s:g} s"
            self._fail(GiveUp(FailureReason.WORKER_FAILED, f"its worker failed, and no other was ready within {wait}"))
        else:
            self._actions.append(ev.AskRoute())

    # -- reservation and prefill --------------------------------------------------------------------------------------

    def _granted(self, event: ev.Event) -> None:
        assert isinstance(event, ev.Granted)
        attempt = self._held_by(event.worker)
        if attempt is None:
            return
        ticket, choice = event.ticket, event.prefill
        if ticket.handoff_id != attempt.handoff or ticket.decode_incarnation != event.worker:
            self._decode_failed(f"{self._name_of(event.worker)} answered with another hand-off's ticket")
            return
        self.timeline.reserved(self._now)
        if choice.worker is not None:
            self._begin_prefill(State.PREFILLING, choice.worker, Prefill(self._attempt_spec(), ticket))
        elif choice.fallback is not None and self.policy == "always" and self.route_request().no_prefill == "fail":
            self._fail(GiveUp(FailureReason.NO_PREFILL, "no prefill worker is linked to the decode worker any more"))
        else:
            self.retries.fallback = self.retries.fallback or choice.fallback
            self._compute_on_decode()

    def _begin_prefill(self, state: State, worker: Incarnation, message: Prefill) -> None:
        assert self.attempt is not None
        self.attempt.prefill = worker
        self._send(worker, message)
        self._note_placement(RouteKind.PREFILL_ONLY if message.ticket is None else RouteKind.RESERVE)
        self._move(state, self._settings.prefill_timeout_s)

    def _compute_on_decode(self) -> None:
        """On D alone; a reservation under the attempt's id is given up for it."""
        assert self.attempt is not None and self.attempt.decode is not None  # noqa: PT018
        self._send(self.attempt.decode, Generate(self._attempt_spec()))
        self._note_placement(RouteKind.LOCAL)
        self._move(State.COMPUTING, self._settings.prefill_timeout_s)

    def _first_drawn(self, event: ev.Event) -> None:
        assert isinstance(event, ev.FirstDrawn)
        attempt, message = self._held_by(event.worker), event.message
        if attempt is None or event.worker != attempt.prefill:
            return
        if message.finish is None and (self.state is State.PREFILLING_ALONE or message.token is None):
            self._prefill_failed(f"{self._name_of(event.worker)} did not end at the last token")
            return
        self._actions.append(ev.PrefillDone(event.worker, attempt.request_id))
        if self.timeline.first_token_at is None:
            self.timeline.prefill = message.stages
            self.num_cached_tokens = message.stages.num_cached_tokens
        if message.finish is not None:
            attempt.holders.discard(event.worker)  # D still waits: it is cancelled
        self._emit(() if message.token is None else (message.token,), message.finish, message.prompt)
        if message.finish is not None:
            return
        self._move(State.HANDING_OVER, self._settings.transfer_timeout_s)
        for delta in attempt.held:
            if self.attempt is attempt:  # until one of them ends it
                self._take(attempt, delta)

    # -- tokens of D --------------------------------------------------------------------------------------------------

    def _hold(self, event: ev.Event) -> None:
        assert isinstance(event, ev.Drawn)
        attempt = self._held_by(event.worker)
        if attempt is not None and event.worker == attempt.decode:
            attempt.held.append(event.delta)

    def _drawn(self, event: ev.Event) -> None:
        assert isinstance(event, ev.Drawn)
        attempt = self.attempt
        if attempt is not None and event.worker == attempt.decode:
            self._take(attempt, event.delta)

    def _take(self, attempt: Attempt, delta: TokenDelta) -> None:
        known = len(self.output) - delta.first_index
        if known < 0 or delta.first_index + len(delta.tokens) > self.spec.stop.max_tokens:
            self._decode_failed(
                f"{len(delta.tokens)} tokens from index {delta.first_index} on, where {len(self.output)} of "
                f"{self.spec.stop.max_tokens} were there"
            )
            return
        if delta.stages is not None and self.timeline.decode is None:
            self.timeline.decode = delta.stages
            self.timeline.handed_over = attempt.prefill is not None
            if self.timeline.first_token_at is None:
                self.num_cached_tokens = delta.stages.num_cached_tokens
        tokens = delta.tokens[known:] if known else delta.tokens
        if delta.finish is not None:
            attempt.holders.clear()  # D has ended it, and P before that
            self._emit(tokens, delta.finish, delta.prompt)
        elif tokens:
            self._emit(tokens, None, delta.prompt)
            if self.state is State.DECODING:
                self._deadline = self._now + self._settings.decode_stall_timeout_s
                return
            if attempt.prefill is not None:
                attempt.holders.discard(attempt.prefill)  # D decodes: the hand-off is over
            self._move(State.DECODING, self._settings.decode_stall_timeout_s)

    def _emit(self, tokens: tuple[SampledToken, ...], finish: FinishReason | None, prompt: tuple[SampledToken, ...]) -> None:
        if tokens and self.timeline.first_token_at is None:
            self.timeline.first_token_at = self._now
        self.output.extend(token.token_id for token in tokens)
        self._actions.append(ev.Emit(tokens, finish, prompt))
        if finish is not None:
            self._end(State.FINISHED)

    # -- failures -----------------------------------------------------------------------------------------------------

    def _attempt_failed(self, event: ev.Event) -> None:
        assert isinstance(event, ev.AttemptFailed)
        attempt, kind = self._held_by(event.worker), event.kind
        if attempt is None:
            return
        attempt.holders.discard(event.worker)
        self._actions.append(ev.Note(f"failure_{kind.value}"))
        message = f"{self._name_of(event.worker)}: {event.message}"
        by_prefill = event.worker == attempt.prefill
        if kind is FailureKind.INVALID:
            self._fail(GiveUp(FailureReason.INVALID, event.message))
        elif kind is FailureKind.TRANSFER and not by_prefill and self.state is State.PREFILLING:
            self._prefill_failed(message)  # D has seen P's end before the coordinator did
        elif (
            attempt.prefill
            and attempt.decode
            and (kind is FailureKind.TRANSFER or (self.state is State.HANDING_OVER and by_prefill))
        ):
            self._transfer_failed()
        elif by_prefill:
            self._prefill_failed(message)
        elif kind is FailureKind.OVERLOADED:
            self._again_unless(self.retries.decode_full(event.worker, message))
        else:
            self._decode_failed(message, draining=kind is FailureKind.DRAINING)

    def _worker_broke(self, event: ev.Event) -> None:
        assert isinstance(event, ev.WorkerBroke)
        attempt = self._held_by(event.worker)
        if attempt is None:
            return
        message = f"{self._name_of(event.worker)}: {event.message}"
        if event.worker != attempt.prefill:
            self._decode_failed(message)
        elif self.state is State.HANDING_OVER:
            self._transfer_failed()
        else:
            self._prefill_failed(message)

    def _worker_lost(self, event: ev.Event) -> None:
        assert isinstance(event, ev.WorkerLost)
        attempt = self._held_by(event.worker)
        if attempt is None:
            return
        attempt.holders.discard(event.worker)
        message = f"{self._name_of(event.worker)}: {event.reason}"
        if event.worker == attempt.decode:
            self._decode_failed(message)
        elif self.state is not State.HANDING_OVER:  # there, D knows whether all of the KV came
            self._prefill_failed(message)

    def _tick(self, event: ev.Event) -> None:
        if self._now < self._deadline:
            return
        self._actions.append(ev.Note(f"timeout_{self.state.value}"))
        if self.state is State.RESERVING:
            message = f"no room for it within {self._settings.reserve_timeout_s:g} s"
            self._fail(GiveUp(FailureReason.OVERLOADED, message))
        elif self.state in (State.PREFILLING, State.PREFILLING_ALONE):
            self._prefill_failed(f"no first token within {self._settings.prefill_timeout_s:g} s")
        elif self.state is State.HANDING_OVER:
            self._transfer_failed()
        elif self.state is State.COMPUTING:
            self._decode_failed(f"no first token within {self._settings.prefill_timeout_s:g} s")
        else:
            self._decode_failed(f"no token within {self._settings.decode_stall_timeout_s:g} s")

    def _prefill_failed(self, message: str) -> None:
        assert self.attempt is not None and self.attempt.prefill is not None  # noqa: PT018
        self._actions.append(ev.Note("prefill_failed"))
        self._again_unless(self.retries.prefill_failed(self.attempt.prefill, message))

    def _transfer_failed(self) -> None:
        self._actions.append(ev.Note("recompute"))
        self.retries.transfer_failed()
        self._again_unless(None)

    def _decode_failed(self, message: str, draining: bool = False) -> None:
        assert self.attempt is not None and self.attempt.decode is not None  # noqa: PT018
        self._actions.append(ev.Note("decode_failed"))
        give_up = self.retries.decode_failed(self.attempt.decode, message, draining)
        if give_up is None:
            self._actions.append(ev.Note("replay"))
        self._again_unless(give_up)

    def _again_unless(self, give_up: GiveUp | None) -> None:
        if give_up is not None:
            self._fail(give_up)
            return
        self._end_attempt()
        self._move(State.PLACING, self._settings.failover_wait_s)
        self._actions.append(ev.AskRoute())

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _cancelled(self, event: ev.Event) -> None:
        self._actions.append(ev.Note("cancel"))
        self._actions.append(ev.Fail(generation_error(FailureReason.CANCELLED, "cancelled", self._settings.retry_after_s)))
        self._end(State.CANCELLED)

    def _shut_down(self, event: ev.Event) -> None:
        self._fail(GiveUp(FailureReason.SHUTTING_DOWN, "the coordinator is shutting down"))

    def _fail(self, why: GiveUp) -> None:
        self._actions.append(ev.Note(f"failed_{why.reason.value}"))
        self._actions.append(ev.Fail(generation_error(why.reason, why.message, self._settings.retry_after_s)))
        self._end(State.FAILED)

    def _ignore(self, event: ev.Event) -> None:
        """It cannot matter any more."""

    def _end(self, state: State) -> None:
        self.timeline.ended_at = self._now
        self._end_attempt()
        self._move(state, None)

    def _end_attempt(self) -> None:
        """Cancel it wherever it may still be held; its id is not known any more."""
        attempt, self.attempt = self.attempt, None
        if attempt is None:
            return
        workers = tuple(worker for worker in (attempt.prefill, attempt.decode) if worker is not None)
        self._actions += [ev.Send(worker, Cancel(attempt.request_id)) for worker in workers if worker in attempt.holders]
        self._actions.append(ev.EndAttempt(attempt.request_id, workers))

    # -- inside -------------------------------------------------------------------------------------------------------

    def _held_by(self, worker: Incarnation) -> Attempt | None:
        """The running attempt, if `worker` may hold something for it; other workers' events change nothing."""
        return self.attempt if self.attempt is not None and worker in self.attempt.holders else None

    def _send(self, worker: Incarnation, message: Reserve | Generate | Prefill) -> None:
        assert self.attempt is not None
        self.attempt.holders.add(worker)
        self._actions.append(ev.Send(worker, message))

    def _attempt_spec(self) -> SequenceSpec:
        assert self.attempt is not None
        return spec_of_attempt(self.spec, self.attempt.request_id, self.output)

    def _note_placement(self, kind: RouteKind) -> None:
        assert self.attempt is not None
        prefill, decode, fallback = self.attempt.prefill, self.attempt.decode, self.retries.fallback
        self.placement = Placement(
            self.policy,
            None if prefill is None else self._name_of(prefill),
            None if decode is None else self._name_of(decode),
            None if fallback is None else fallback.value,
        )
        self._actions.append(ev.Note(f"route_{kind.value}"))
        if fallback is not None:
            self._actions.append(ev.Note(f"fallback_{fallback.value}"))

    def _move(self, state: State, timeout_s: float | None) -> None:
        """The one place where the state changes."""
        if state not in self._targets:
            raise InvalidTransition("request life", self.state.value, f"move to {state.value}", tuple(self._history))
        self.state = state
        self._history.append(state.value)
        self._deadline = _NEVER if timeout_s is None else self._now + timeout_s
