"""Where everything meets: owns the cluster view, all lives and their streams, and carries out what they ask for.

    HTTP half ── submit / cancel ─▶ ┌────────────┐ ─ events ─▶ RequestLife (one per sequence)
    ControlHub ── messages ───────▶ │ Dispatcher │ ◀─ actions ─
    ticker ── time ───────────────▶ └────────────┘ ─ messages ─▶ sessions    ─ tokens ─▶ TokenStream

All of it runs in one event loop and nothing here waits: a message is handled completely before the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable

from coordinator import life_events as ev
from coordinator.admission import refusal
from coordinator.cluster_report import cluster_report
from coordinator.cluster_view import ClusterView, MemberGone, SendPeers, ViewAction
from coordinator.control_hub import Session
from coordinator.failure_reasons import generation_error
from coordinator.generation import Policy, Tokens
from coordinator.placement import Placer
from coordinator.placement_settings import PlacementSettings
from coordinator.request_life import RequestLife
from coordinator.routing import Route
from coordinator.token_stream import TokenStream
from wire.control import (
    Cancel,
    Drain,
    FirstToken,
    Heartbeat,
    HeartbeatAck,
    Leaving,
    LinkReport,
    Refused,
    Register,
    RequestFailed,
    Reserved,
    Role,
    TokenBatch,
    Welcome,
    WorkerMessage,
)
from wire.errors import InvalidTransition
from wire.ids import Incarnation, RequestId, WorkerId
from wire.sequence import SequenceSpec

_log = logging.getLogger("kvrelay.coordinator.dispatcher")


class Dispatcher:
    """Implements `coordinator.generation.Generator` for the HTTP half and `SessionHandler` for the control hub."""

    def __init__(
        self, settings: PlacementSettings, incarnation: Incarnation, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings
        self.incarnation = incarnation
        self.view = ClusterView(settings, clock())
        self.placer = Placer(self.view, settings)
        self.counters: Counter[str] = Counter()
        self._clock = clock
        self._streams: dict[RequestLife, TokenStream] = {}
        self._attempts: dict[RequestId, RequestLife] = {}
        self._sessions: dict[Incarnation, Session] = {}
        self._workers_of: dict[int, Incarnation] = {}  # by id() of a live session
        self._names: dict[Incarnation, str] = {}
        self._stopping = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._ticker: asyncio.Task[None] | None = None

    # -- lifecycle ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch deadlines; needs a running event loop."""
        if self._ticker is None:
            self._ticker = asyncio.create_task(self._tick_forever())

    async def drain(self, deadline_s: float) -> bool:
        """Take nothing new, and wait until everything has ended, at most `deadline_s`. True: nothing is left."""
        self._stopping = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        return not self._streams

    async def close(self) -> None:
        """End what is left with an error, and all sessions. Idempotent."""
        self._stopping = True
        for life in list(self._streams):
            self._feed(life, ev.ShutDown())
        for session in list(self._sessions.values()):
            session.abort()
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
            self._ticker = None

    def tick(self) -> None:
        """Let time pass: leases, then the lives' deadlines."""
        self._carry_out(self.view.tick(self._clock()))
        for life in list(self._streams):
            self._feed(life, ev.Tick())

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self.settings.tick_s)
            try:
                self.tick()
            except Exception:  # the ticker must outlive any one sequence's fault, or no deadline would be kept any more
                _log.exception("a tick failed")
                self.counters["internal_error"] += 1

    # -- Generator --------------------------------------------------------------------------------------------------------

    @property
    def model(self) -> str | None:
        identity = self.view.identity
        return identity.model if identity is not None and self.view.members else None

    @property
    def max_model_len(self) -> int | None:
        return self.view.max_model_len

    def ready(self) -> bool:
        if self._stopping or not self.view.serving(Role.DECODE):
            return False
        return self.settings.policy != "always" or bool(self.view.usable_pairs())

    async def submit(self, spec: SequenceSpec, policy: Policy | None) -> TokenStream:
        policy = policy or self.settings.policy
        why = refusal(self.view, self.settings, spec, policy, len(self._streams), self._stopping)
        if why is not None:
            self.counters[f"refused_{why.reason.value}"] += 1
            raise generation_error(why.reason, why.message, self.settings.retry_after_s)
        life = RequestLife(spec, policy, self.settings, self._clock(), self._name_of)
        stream = TokenStream(life, lambda: self._feed(life, ev.CancelAsked()))
        self._streams[life] = stream
        self._idle.clear()
        self._run(life, [ev.AskRoute()])
        if stream.error is not None:
            raise stream.error
        return stream

    # -- SessionHandler ---------------------------------------------------------------------------------------------------

    def register(self, message: Register, session: Session) -> bool:
        now, info = self._clock(), message.worker
        if self._stopping:
            session.send(Refused("the coordinator is shutting down", retry=True))
            return False
        refused = self.view.check(message, now)
        if refused is not None:
            _log.warning("worker %.100s refused: %s", info.worker_id, refused.reason)
            self.counters["worker_refused"] += 1
            session.send(Refused(refused.reason, refused.retry))
            return False
        self._carry_out(self.view.evict_predecessors(info, now))
        self._sessions[info.incarnation] = session
        self._workers_of[id(session)] = info.incarnation
        self._names[info.incarnation] = info.worker_id
        session.send(Welcome(self.incarnation, self.settings.heartbeat_interval_s, self.settings.lease_s))
        self._carry_out(self.view.join(info, now))
        _log.info("worker %s joined as %s", info.worker_id, info.role.value)
        self._wake_waiting()
        return True

    def received(self, message: WorkerMessage, session: Session) -> None:
        worker = self._workers_of.get(id(session))
        if worker is None:
            return  # it was replaced or lost; its channel is about to end
        now = self._clock()
        self.view.heard(worker, now)
        match message:
            case TokenBatch():
                for delta in message.deltas:
                    self._deliver(delta.request_id, ev.Drawn(worker, delta), answered=delta.stages is not None)
            case FirstToken():
                self._deliver(message.request_id, ev.FirstDrawn(worker, message))
            case Reserved():
                self._reserved(worker, message)
            case RequestFailed():
                self.placer.ended(worker, message.request_id)
                self._deliver(message.request_id, ev.AttemptFailed(worker, message.kind, message.message))
            case Heartbeat():
                if self._is_of(worker, message.incarnation, session):
                    self.view.heartbeat(worker, message.load)
                    self.placer.assignments.heartbeat(worker, now)
                    session.send(HeartbeatAck(self.incarnation))
            case LinkReport():
                self.view.link_report(worker, message)
                self._wake_waiting()
            case Leaving():
                if self._is_of(worker, message.incarnation, session):
                    if message.finished:
                        self._carry_out(self.view.said_goodbye(worker, now))
                    else:
                        self.view.draining(worker)
            case Register():
                self._broke_protocol(worker, session, "registered twice on one channel")

    def closed(self, session: Session, reason: str) -> None:
        worker = self._workers_of.get(id(session))
        if worker is not None:
            self._carry_out(self.view.gone(worker, reason, self._clock()))

    # -- operators --------------------------------------------------------------------------------------------------------

    def drain_worker(self, worker_id: WorkerId, deadline_s: float) -> bool:
        """Ask a worker to finish and leave; false: there is none of that name."""
        incarnation = self.view.find(worker_id)
        if incarnation is None:
            return False
        self.view.draining(incarnation)
        self._sessions[incarnation].send(Drain(deadline_s))
        return True

    def cluster(self) -> dict[str, object]:
        """Everything known of the cluster, ready for JSON."""
        return cluster_report(
            self.incarnation,
            self.settings,
            self.view,
            self.placer.assignments,
            self.counters,
            self.outstanding,
            self._clock(),
        )

    @property
    def outstanding(self) -> int:
        """Sequences that were accepted and have not ended."""
        return len(self._streams)

    def holds_nothing(self) -> bool:
        """No sequence, no attempt and no assignment is left."""
        return not self._streams and not self._attempts and self.placer.assignments.is_empty()

    # -- messages to lives ------------------------------------------------------------------------------------------------

    def _reserved(self, worker: Incarnation, message: Reserved) -> None:
        life = self._attempts.get(message.request_id)
        if life is None:
            return  # late: its attempt was cancelled
        self.placer.assignments.answered(worker, message.request_id)
        choice = self.placer.prefill_for(worker, message.ticket.skip_tokens, life.route_request(), life.spec)
        self._deliver(message.request_id, ev.Granted(worker, message.ticket, choice))

    def _deliver(self, request_id: RequestId, event: ev.WorkerEvent, answered: bool = False) -> None:
        life = self._attempts.get(request_id)
        if life is None:
            return  # late: its attempt has ended, and a Cancel is on its way or was not needed
        if answered:
            self.placer.assignments.answered(event.worker, request_id)
        try:
            self._feed(life, event)
        except InvalidTransition as error:
            _log.error("worker %s broke the protocol: %s", self._name_of(event.worker), error)
            self.counters["protocol_error"] += 1
            self._feed(life, ev.WorkerBroke(event.worker, f"sent what the protocol does not allow ({error.event})"))

    def _feed(self, life: RequestLife, event: ev.Event) -> None:
        if life in self._streams:
            self._run(life, life.handle(event, self._clock()))

    def _run(self, life: RequestLife, actions: list[ev.Action]) -> None:
        stream = self._streams[life]
        waiting = deque(actions)
        while waiting:
            action = waiting.popleft()
            match action:
                case ev.Emit():
                    stream.push(Tokens(action.tokens, action.finish, action.prompt))
                case ev.Send():
                    self._send(action)
                case ev.AskRoute():
                    waiting.extend(self._answer_route(life))
                case ev.BeginAttempt():
                    self._attempts[action.request_id] = life
                case ev.EndAttempt():
                    del self._attempts[action.request_id]
                    for worker in action.workers:
                        self.placer.ended(worker, action.request_id)
                case ev.PrefillDone():
                    self.placer.ended(action.worker, action.request_id)
                case ev.Note():
                    self.counters[action.what] += 1
                case ev.Fail():
                    stream.fail(action.error)
        if life.is_over:
            del self._streams[life]
            if not self._streams:
                self._idle.set()

    def _answer_route(self, life: RequestLife) -> list[ev.Action]:
        answer = self.placer.route(life.route_request(), life.spec)
        return life.handle(ev.Routed(answer) if isinstance(answer, Route) else ev.NotRouted(answer), self._clock())

    def _send(self, action: ev.Send) -> None:
        session = self._sessions.get(action.worker)
        if session is None:
            return  # it has just gone: its life hears of that by WorkerLost
        if not isinstance(action.message, Cancel):
            self.placer.sent(action.worker, action.message, self._clock())
        session.send(action.message)

    # -- membership ---------------------------------------------------------------------------------------------------------

    def _carry_out(self, actions: list[ViewAction]) -> None:
        for action in actions:
            if isinstance(action, SendPeers):
                for worker in action.to:
                    if (session := self._sessions.get(worker)) is not None:
                        session.send(action.peers)
            else:
                self._member_gone(action)

    def _member_gone(self, gone: MemberGone) -> None:
        _log.log(logging.INFO if gone.in_order else logging.WARNING, "worker %s is gone: %s", gone.worker_id, gone.reason)
        self.counters["worker_left" if gone.in_order else "worker_gone"] += 1
        worker = gone.incarnation
        session = self._sessions.pop(worker, None)
        if session is not None:
            self._workers_of.pop(id(session), None)
            session.abort()
        self.placer.forget(worker)
        for life in list(self._streams):
            self._feed(life, ev.WorkerLost(worker, gone.reason))
        self._names.pop(worker, None)

    def _wake_waiting(self) -> None:
        """The cluster has changed for the better: sequences that wait for a place ask again."""
        for life in [life for life in self._streams if life.attempt is None]:
            self._feed(life, ev.Tick())

    def _is_of(self, worker: Incarnation, named: Incarnation, session: Session) -> bool:
        if named == worker:
            return True
        self._broke_protocol(worker, session, "named another incarnation than its own")
        return False

    def _broke_protocol(self, worker: Incarnation, session: Session, what: str) -> None:
        _log.error("worker %s %s", self._name_of(worker), what)
        self.counters["protocol_error"] += 1
        session.abort()

    def _name_of(self, worker: Incarnation) -> str:
        return self._names.get(worker, worker)
