"""Where a sequence runs: pure functions of what is known of the cluster and of the request's shape.

    choose_route      ─▶ a prefill worker alone (one token is all) | a reservation on D | D alone | nowhere, and why
    choose_prefill    ─▶ once D has said how much of the prompt its cache holds: P, or D after all

D: least predicted work, in blocks relative to its pool, then fewest sequences. P, among those linked to D: least uncached
prompt tokens in front of the sequence and in it, so that a prefix hit decides when it saves more than the queue costs.
Ties go to whoever was given something longest ago, never to a name: a burst spreads evenly.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from coordinator.failure_reasons import FailureReason
from coordinator.generation import Policy
from coordinator.placement_settings import NoPrefill
from wire.ids import Incarnation


class Fallback(enum.Enum):
    """Why the policy's wish was not met."""

    NO_PREFILL = "no_prefill"
    PREFILL_FAILED = "prefill_failed"
    TRANSFER_FAILED = "transfer_failed"
    DECODE_FAILED = "decode_failed"


class RouteKind(enum.Enum):
    PREFILL_ONLY = "prefill_only"
    RESERVE = "reserve"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class DecodeCandidate:
    worker: Incarnation
    num_blocks: int
    predicted_blocks: int
    sequences: int
    last_serial: int


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    worker: Incarnation
    num_blocks: int
    predicted_tokens: int
    last_serial: int


@dataclass(frozen=True, slots=True)
class RoutingView:
    """Workers that take new work, and the (prefill, decode) pairs with a proven link."""

    block_size: int
    decode: tuple[DecodeCandidate, ...]
    prefill: tuple[PrefillCandidate, ...]
    links: frozenset[tuple[Incarnation, Incarnation]]

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A sequence's shape, and what its life so far rules out."""

    policy: Policy
    num_tokens: int  # prompt and resumed ones: to be computed
    remaining: int  # output tokens still wanted
    auto_min_prefill_tokens: int
    no_prefill: NoPrefill
    local_only: bool = False
    exclude_prefill: frozenset[Incarnation] = frozenset()
    exclude_decode: frozenset[Incarnation] = frozenset()
    avoid_decode: frozenset[Incarnation] = frozenset()  # taken only if nothing else is there

    @property
    def wants_prefill(self) -> bool:
        if self.local_only or self.policy == "never":
            return False
        return self.policy == "always" or self.num_tokens >= self.auto_min_prefill_tokens


@dataclass(frozen=True, slots=True)
class Route:
    kind: RouteKind
    worker: Incarnation  # the prefill worker for PREFILL_ONLY, else the decode worker
    fallback: Fallback | None = None


@dataclass(frozen=True, slots=True)
class NoRoute:
    reason: FailureReason
    message: str


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """`worker` None: D computes the prompt itself; a wish of the policy unless `fallback` says otherwise."""

    worker: Incarnation | None
    fallback: Fallback | None = None


def choose_route(view: RoutingView, request: RouteRequest, affinity: Mapping[Incarnation, int]) -> Route | NoRoute:
    """
    Args:
        affinity: prompt tokens that each prefill worker's cache is thought to hold.
    """
    blocks = view.blocks_for(request.num_tokens + request.remaining)
    decode = [d for d in view.decode if d.worker not in request.exclude_decode and d.num_blocks >= blocks]
    fallback = None
    if request.wants_prefill:
        prefill = _usable_prefill(view, request)
        if request.remaining <= 1 and prefill:
            return Route(RouteKind.PREFILL_ONLY, _least_tokens(prefill, request, affinity))
        linked = [d for d in decode if any((p.worker, d.worker) in view.links for p in prefill)]
        if linked:
            return Route(RouteKind.RESERVE, _least_work(linked, request))
        if request.policy == "always" and request.no_prefill == "fail":
            return NoRoute(FailureReason.NO_PREFILL, "no prefill worker is linked to a decode worker")
        fallback = Fallback.NO_PREFILL
    if not decode:
        return NoRoute(FailureReason.NO_WORKER, "no decode worker is ready")
    return Route(RouteKind.LOCAL, _least_work(decode, request), fallback)


def choose_prefill(
    view: RoutingView,
    request: RouteRequest,
    decode: Incarnation,
    skip_tokens: int,
    affinity: Mapping[Incarnation, int],
) -> PrefillChoice:
    """The prefill worker for a sequence that `decode` holds blocks for and whose first `skip_tokens` tokens it has."""
    if request.policy == "auto" and request.num_tokens - skip_tokens < request.auto_min_prefill_tokens:
        return PrefillChoice(None)
    linked = [p for p in _usable_prefill(view, request) if (p.worker, decode) in view.links]
    if not linked:
        return PrefillChoice(None, Fallback.NO_PREFILL)
    return PrefillChoice(_least_tokens(linked, request, affinity))


def _usable_prefill(view: RoutingView, request: RouteRequest) -> list[PrefillCandidate]:
    blocks = view.blocks_for(request.num_tokens)
    return [p for p in view.prefill if p.worker not in request.exclude_prefill and p.num_blocks >= blocks]


def _least_work(candidates: list[DecodeCandidate], request: RouteRequest) -> Incarnation:
    liked: Iterable[DecodeCandidate] = [d for d in candidates if d.worker not in request.avoid_decode] or candidates
    return min(liked, key=lambda d: (d.predicted_blocks / d.num_blocks, d.sequences, d.last_serial)).worker


def _least_tokens(
    candidates: list[PrefillCandidate], request: RouteRequest, affinity: Mapping[Incarnation, int]
) -> Incarnation:
    def key(p: PrefillCandidate) -> tuple[int, int]:
        uncached = request.num_tokens - affinity.get(p.worker, 0)
        return p.predicted_tokens + uncached, p.last_serial

    return min(candidates, key=key).worker
