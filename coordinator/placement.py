"""Puts routing's questions: from the cluster view, the coordinator's own assignments and the prefix index to a decision."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.assignments import Assignments
from coordinator.cluster_view import ClusterView
from coordinator.placement_settings import PlacementSettings
from coordinator.prefix_index import PrefixIndex
from coordinator.routing import (
    DecodeCandidate,
    NoRoute,
    PrefillCandidate,
    PrefillChoice,
    Route,
    RouteRequest,
    RoutingView,
    choose_prefill,
    choose_route,
)
from wire.block_hash import BlockHash, block_hashes
from wire.control import Generate, Prefill, Reserve, Role
from wire.ids import Incarnation, RequestId
from wire.sequence import SequenceSpec


class Placer:
    """Owns the assignments and the prefix index; reads the view."""

    def __init__(self, view: ClusterView, settings: PlacementSettings) -> None:
        self._view = view
        self.assignments = Assignments()
        self.prefixes = PrefixIndex(settings.prefix_index_blocks)
        self._hashed: tuple[tuple[int, ...], tuple[int, ...], str, list[BlockHash]] = ((), (), "", [])

    def route(self, request: RouteRequest, spec: SequenceSpec) -> Route | NoRoute:
        view = self._routing_view()
        alone = request.wants_prefill and request.remaining <= 1
        return choose_route(view, request, self._affinity(view, spec) if alone else {})

    def prefill_for(self, decode: Incarnation, skip_tokens: int, request: RouteRequest, spec: SequenceSpec) -> PrefillChoice:
        view = self._routing_view()
        return choose_prefill(view, request, decode, skip_tokens, self._affinity(view, spec))

    def sent(self, worker: Incarnation, message: Reserve | Generate | Prefill, now: float) -> None:
        """Book what a worker was given."""
        spec = message.spec
        if isinstance(message, Prefill):
            hashes = self._hashes(spec)
            cached = self.prefixes.match(hashes, (worker,)).get(worker, 0) * self._block_size
            self.assignments.assign(worker, spec.request_id, self._num_tokens(spec) - cached, now, needs_answer=False)
            self.prefixes.record(hashes, worker)
        else:
            blocks = -(-(self._num_tokens(spec) + 1) // self._block_size)
            self.assignments.assign(worker, spec.request_id, blocks, now, needs_answer=True)

    def ended(self, worker: Incarnation, request_id: RequestId) -> None:
        self.assignments.end(worker, request_id)

    def forget(self, worker: Incarnation) -> None:
        self.assignments.forget(worker)
        self.prefixes.forget(worker)

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def _block_size(self) -> int:
        return self._view.identity.block_size if self._view.identity is not None else 1

    @staticmethod
    def _num_tokens(spec: SequenceSpec) -> int:
        return len(spec.prompt) + len(spec.resumed)

    def _hashes(self, spec: SequenceSpec) -> list[BlockHash]:
        """Remembers the last answer: a prompt is routed and sent in one go."""
        prompt, resumed, salt, hashes = self._hashed
        if prompt is not spec.prompt or resumed != spec.resumed or salt != spec.cache_salt:
            hashes = list(block_hashes(spec.tokens, self._block_size, spec.cache_salt))
            self._hashed = (spec.prompt, spec.resumed, spec.cache_salt, hashes)
        return hashes

    def _affinity(self, view: RoutingView, spec: SequenceSpec) -> Mapping[Incarnation, int]:
        """Only full blocks before the last token count: the last one is computed in any case. So is every one whose
        log-probability is wanted."""
        if spec.prompt_logprobs is not None:
            return {}
        found = self.prefixes.match(self._hashes(spec), [p.worker for p in view.prefill])
        most = self._num_tokens(spec) - 1
        return {worker: min(blocks * self._block_size, most) for worker, blocks in found.items()}

    def _routing_view(self) -> RoutingView:
        decode, prefill = [], []
        for member in self._view.serving(Role.DECODE):
            out, load = self.assignments.of(member.info.incarnation), member.load
            in_use = load.blocks_total - load.blocks_free - load.blocks_cached
            decode.append(
                DecodeCandidate(
                    member.info.incarnation, member.info.num_blocks, out.predicted(in_use), out.sequences, out.last_serial
                )
            )
        for member in self._view.serving(Role.PREFILL):
            if not member.was_linked:
                continue
            out = self.assignments.of(member.info.incarnation)
            prefill.append(
                PrefillCandidate(
                    member.info.incarnation,
                    member.info.num_blocks,
                    out.predicted(member.load.waiting_tokens),
                    out.last_serial,
                )
            )
        return RoutingView(self._block_size, tuple(decode), tuple(prefill), self._view.usable_pairs())
