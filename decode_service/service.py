"""The decode worker's logic between its coordinator, its engine and the hand-off server.

    coordinator              service                engine                     hand-off server
    Reserve ───────────────▶ remember, Reserve ───▶ lends blocks ────────────▶ grant: window, ticket
      ◀── Reserved(ticket) ──────────────────────────────────────────────────┘
                             Fill ◀─────────────────────────────────────────── delivered (all KV verified)
      ◀── TokenBatch ─────── one message per step ◀── TokensSampled
    Generate ──────────────▶ Add, or ComputeHere when it holds a reservation
    Cancel ────────────────▶ Abort, at once or when the writer has stopped

Runs on the event loop; the engine's events arrive by `on_engine_events`, called there as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from decode_service.handoff_server import HandoffServer
from engine.handle import EngineHandle
from engine.load import worker_load
from engine.messages import (
    Abort,
    Add,
    ComputeHere,
    EngineEvent,
    Fill,
    Rejected,
    Reserve,
    Reserved,
    SequenceTimes,
    TokensSampled,
)
from service_kit.member import Member
from service_kit.rate import RateMeter
from wire import control
from wire.control import CoordinatorMessage, FailureKind, WorkerLoad, WorkerMessage
from wire.ids import HandoffId, Incarnation, RequestId
from wire.kv_layout import KvLayout
from wire.sequence import SampledToken

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    """Every request that this worker knows, from its first message until its terminal one."""

    num_prompt_tokens: int
    handoff_id: HandoffId | None = None
    lease_s: float = 0.0
    transfer_s: float = 0.0
    cancelled: bool = False  # waits only for its writer to stop


class DecodeService(Member):
    """See the module's drawing."""

    def __init__(
        self,
        engine: EngineHandle,
        layout: KvLayout,
        incarnation: Incarnation,
        post: Callable[[WorkerMessage], None],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(incarnation, post)
        self._engine = engine
        self._layout = layout
        self._requests: dict[RequestId, _Request] = {}
        self._server: HandoffServer | None = None
        self._rate = RateMeter(clock)

    def use_server(self, server: HandoffServer) -> None:
        """The server reports to this service, so it is made second."""
        self._server = server

    @property
    def server(self) -> HandoffServer:
        assert self._server is not None, "use_server comes before the first message"
        return self._server

    # -- from the coordinator -------------------------------------------------------------------------------------------

    def on_message(self, message: CoordinatorMessage) -> None:
        match message:
            case control.Reserve(spec=spec):
                if self._accepts(spec.request_id):
                    self._requests[spec.request_id] = _Request(len(spec.tokens), message.handoff_id, message.lease_s)
                    self._engine.submit(Reserve(spec))
            case control.Generate(spec=spec):
                self._on_generate(message)
            case control.Cancel(request_id=request_id):
                self._cancel(request_id, "cancelled by the coordinator")
            case control.Drain():
                self.begin_drain()
            case _:
                log.warning("not a decode worker's message: %s", type(message).__name__)

    def on_coordinator_lost(self) -> None:
        """Nobody reads what would come out: end everything."""
        for request_id in list(self._requests):
            self._cancel(request_id, "the coordinator is gone")

    def _on_generate(self, message: control.Generate) -> None:
        spec = message.spec
        request = self._requests.get(spec.request_id)
        if request is None:
            if self._accepts(spec.request_id):
                self._requests[spec.request_id] = _Request(len(spec.tokens))
                self._engine.submit(Add(spec))
        elif request.cancelled or self.server.has_writer(spec.request_id):
            self._post_failed(spec.request_id, FailureKind.INTERNAL, "a prefill worker is writing into this reservation")
        else:
            # The engine turns the reservation into a computation before the server says `freed`, which is then ignored.
            request.handoff_id = None
            self._engine.submit(ComputeHere(spec.request_id))
            self.server.cancel(spec.request_id, "computed here instead")

    def _accepts(self, request_id: RequestId) -> bool:
        if self.draining:
            self._post_failed(request_id, FailureKind.DRAINING, "this decode worker is draining")
        elif request_id in self._requests:
            log.warning("request %s is here already", request_id)
        return not self.draining and request_id not in self._requests

    def _cancel(self, request_id: RequestId, reason: str) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        if self.server.holds(request_id):
            request.cancelled = True
            self.server.cancel(request_id, reason)
        else:
            del self._requests[request_id]
            self._engine.submit(Abort(request_id))

    # -- from the engine ------------------------------------------------------------------------------------------------

    def on_engine_events(self, events: tuple[EngineEvent, ...]) -> None:
        """All that one step, or one batch of commands, brought."""
        deltas: list[control.TokenDelta] = []
        for event in events:
            if event.request_id not in self._requests:
                continue  # cancelled while the event was on its way; its Abort has been submitted
            match event:
                case TokensSampled():
                    deltas.append(self._delta(event))
                case Reserved():
                    self._on_reserved(event)
                case Rejected(request_id=request_id, reason=reason, invalid=invalid):
                    del self._requests[request_id]
                    self._post_failed(request_id, FailureKind.INVALID if invalid else FailureKind.INTERNAL, reason)
                case _:
                    log.error("unexpected engine event %s", event)
        if deltas:
            self._post(control.TokenBatch(tuple(deltas)))

    def on_engine_dead(self, error: BaseException) -> None:
        """The engine thread has died: nothing that runs here can finish."""
        for request_id, request in list(self._requests.items()):
            if not request.cancelled:
                self._post_failed(request_id, FailureKind.INTERNAL, f"the engine has died: {error!r}")
        self._requests.clear()

    def _on_reserved(self, event: Reserved) -> None:
        request = self._requests[event.request_id]
        if request.handoff_id is None:
            return  # it became a computation before the reservation was granted
        num_cached_blocks = event.num_cached_tokens // self._layout.block_size
        ticket = self.server.grant(
            event.request_id,
            request.handoff_id,
            event.block_ids[num_cached_blocks:],
            skip_tokens=event.num_cached_tokens,
            num_tokens=request.num_prompt_tokens,
            lease_s=request.lease_s,
        )
        self._post(control.Reserved(event.request_id, ticket))

    def _delta(self, event: TokensSampled) -> control.TokenDelta:
        request = self._requests[event.request_id]
        self._rate.add(len(event.tokens))
        if event.finish is not None:
            del self._requests[event.request_id]
        stages = None if event.times is None else _stages(event.times, request.transfer_s)
        return control.TokenDelta(event.request_id, event.first_index, event.tokens, event.finish, stages, event.prompt)

    # -- from the hand-off server (HandoffOutcome) ----------------------------------------------------------------------

    def delivered(self, request_id: RequestId, first_token: SampledToken, transfer_s: float) -> None:
        self._requests[request_id].transfer_s = transfer_s
        self._engine.submit(Fill(request_id, first_token))

    def freed(self, request_id: RequestId) -> None:
        request = self._requests.get(request_id)
        if request is not None and request.handoff_id is None:
            return  # computed here instead: the engine has taken the blocks back already
        self._requests.pop(request_id, None)
        self._engine.submit(Abort(request_id))

    def failed(self, request_id: RequestId, kind: FailureKind, reason: str) -> None:
        request = self._requests[request_id]
        if not request.cancelled:
            request.cancelled = True
            self._post_failed(request_id, kind, reason)

    # -- lifecycle ------------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not self._requests

    def tick(self) -> None:
        self.server.tick()

    def load(self) -> WorkerLoad:
        return worker_load(self._engine.stats(), self.server.totals, self._rate.per_second(), self.draining)


def _stages(times: SequenceTimes, transfer_s: float) -> control.DecodeStages:
    return control.DecodeStages(transfer_s, times.queue_s, times.compute_s, times.num_cached_tokens)
