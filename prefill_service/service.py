"""The prefill worker's logic between its coordinator, its engine and the hand-off client.

    coordinator                service              engine                         hand-off client
    Prefill(spec, ticket) ───▶ Add(export) ───────▶ chunk after chunk              start: open at D
                               blocks computed ◀─── BlocksComputed ──────────────▶ push full blocks meanwhile
      ◀── FirstToken ───────── at once ◀─────────── TokensSampled ───────────────▶ push the rest, complete
                               Release ◀───────────────────────────────────────── source released (acked, or given up)
    Cancel ──────────────────▶ Abort, at once or when the put in flight has ended

Runs on the event loop; the engine's events arrive by `on_engine_events`, called there as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from engine.handle import EngineHandle
from engine.load import worker_load
from engine.messages import (
    Abort,
    Add,
    BlocksComputed,
    EngineEvent,
    Rejected,
    Release,
    TokensSampled,
)
from prefill_service.handoff_client import HandoffClient
from prefill_service.link_manager import LinkManager
from service_kit.member import Member
from service_kit.rate import RateMeter
from wire import control
from wire.control import CoordinatorMessage, FailureKind, WorkerLoad, WorkerMessage
from wire.ids import Incarnation, RequestId

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    """Every request whose blocks this worker holds, or will."""

    num_prompt_tokens: int
    computed: bool = False  # the first token is drawn: the engine only holds the blocks
    silent: bool = False  # cancelled, or its terminal message has been sent


class PrefillService(Member):
    """See the module's drawing."""

    def __init__(
        self,
        engine: EngineHandle,
        incarnation: Incarnation,
        post: Callable[[WorkerMessage], None],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(incarnation, post)
        self._engine = engine
        self._requests: dict[RequestId, _Request] = {}
        self._rate = RateMeter(clock)
        self._last_prefill_tokens = 0
        self._client: HandoffClient | None = None
        self._links: LinkManager | None = None

    def use(self, client: HandoffClient, links: LinkManager) -> None:
        """Both report to this service, so they are made second."""
        self._client = client
        self._links = links

    @property
    def client(self) -> HandoffClient:
        assert self._client is not None, "use comes before the first message"
        return self._client

    @property
    def links(self) -> LinkManager:
        assert self._links is not None, "use comes before the first message"
        return self._links

    # -- from the coordinator -------------------------------------------------------------------------------------------

    def on_message(self, message: CoordinatorMessage) -> None:
        match message:
            case control.Prefill():
                self._on_prefill(message)
            case control.Cancel(request_id=request_id):
                self._cancel(request_id, "cancelled by the coordinator")
            case control.DecodePeers(peers=peers):
                self.links.set_peers(peers)
            case control.Drain():
                self.begin_drain()
            case _:
                log.warning("not a prefill worker's message: %s", type(message).__name__)

    def on_coordinator_lost(self) -> None:
        """Nobody reads what would come out: end everything."""
        for request_id in list(self._requests):
            self._cancel(request_id, "the coordinator is gone")

    def _on_prefill(self, message: control.Prefill) -> None:
        spec, ticket = message.spec, message.ticket
        if self.draining:
            self._post_failed(spec.request_id, FailureKind.DRAINING, "this prefill worker is draining")
            return
        if spec.request_id in self._requests:
            log.warning("request %s is here already", spec.request_id)
            return
        link = None if ticket is None else self.links.link_to(ticket.decode_incarnation)
        if ticket is not None and link is None:
            self._post_failed(spec.request_id, FailureKind.INTERNAL, f"no link to decode worker {ticket.decode}")
            return
        self._requests[spec.request_id] = _Request(len(spec.tokens))
        self._engine.submit(Add(spec, export=True))
        if ticket is not None and link is not None:
            self.client.start(spec.request_id, ticket, link)

    def _cancel(self, request_id: RequestId, reason: str) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        request.silent = True
        if self.client.holds(request_id):
            self.client.cancel(request_id, reason)
        else:
            self._drop(request_id)

    # -- from the engine ------------------------------------------------------------------------------------------------

    def on_engine_events(self, events: tuple[EngineEvent, ...]) -> None:
        """All that one step, or one batch of commands, brought."""
        for event in events:
            request = self._requests.get(event.request_id)
            if request is None:
                continue  # cancelled while the event was on its way; its Abort has been submitted
            match event:
                case BlocksComputed(request_id=request_id):
                    self.client.blocks_computed(request_id, event.num_tokens, event.block_ids)
                case TokensSampled():
                    self._on_first_token(request, event)
                case Rejected(request_id=request_id, reason=reason, invalid=invalid):
                    self._on_rejected(request, request_id, reason, invalid)
                case _:
                    log.error("unexpected engine event %s", event)

    def on_engine_dead(self, error: BaseException) -> None:
        """The engine thread has died: nothing that runs here can finish."""
        for request_id, request in list(self._requests.items()):
            self._on_rejected(request, request_id, f"the engine has died: {error!r}", invalid=False)

    def _on_first_token(self, request: _Request, event: TokensSampled) -> None:
        request.computed = True
        token = event.tokens[0] if event.tokens else None
        assert event.times is not None, "an exported sequence's only tokens are its first"
        if not request.silent:
            times = event.times
            stages = control.PrefillStages(times.queue_s, times.compute_s, times.num_cached_tokens)
            self._post(control.FirstToken(event.request_id, token, event.finish, stages, event.prompt))
        if not self.client.holds(event.request_id):
            self._drop(event.request_id)
        elif event.finish is not None or token is None:
            request.silent = True
            self.client.cancel(event.request_id, "ended with its first token")
        else:
            self.client.prefill_done(event.request_id, request.num_prompt_tokens, token)

    def _on_rejected(self, request: _Request, request_id: RequestId, reason: str, invalid: bool) -> None:
        request.computed = True  # the engine holds nothing for it
        if not request.silent:
            request.silent = True
            self._post_failed(request_id, FailureKind.INVALID if invalid else FailureKind.INTERNAL, reason)
        self._cancel(request_id, reason)

    # -- from the hand-off client (ExportOutcome) -----------------------------------------------------------------------

    def source_released(self, request_id: RequestId) -> None:
        self._drop(request_id)

    def handoff_failed(self, request_id: RequestId, kind: FailureKind, reason: str) -> None:
        self._post_failed(request_id, kind, reason)

    def _drop(self, request_id: RequestId) -> None:
        """Nobody reads the blocks any more: give them back, whether or not the prompt was finished."""
        request = self._requests.pop(request_id)
        self._engine.submit(Release(request_id) if request.computed else Abort(request_id))

    # -- lifecycle ------------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """No prompt is being computed and no KV is waiting to be fetched."""
        return not self._requests

    def tick(self) -> None:
        self.client.tick()
        stats = self._engine.stats()
        self._rate.add(stats.prefill_tokens - self._last_prefill_tokens)
        self._last_prefill_tokens = stats.prefill_tokens

    def load(self) -> WorkerLoad:
        return worker_load(self._engine.stats(), self.client.totals, self._rate.per_second(), self.draining)
