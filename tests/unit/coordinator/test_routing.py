"""Routing: which workers, and that a burst spreads evenly."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_fakes import BLOCK_SIZE

from coordinator.assignments import Assignments
from coordinator.failure_reasons import FailureReason
from coordinator.prefix_index import PrefixIndex
from coordinator.routing import (
    DecodeCandidate,
    Fallback,
    NoRoute,
    PrefillCandidate,
    PrefillChoice,
    Route,
    RouteKind,
    RouteRequest,
    RoutingView,
    choose_prefill,
    choose_route,
)
from wire.block_hash import block_hashes
from wire.ids import Incarnation, RequestId

ALWAYS = RouteRequest("always", num_tokens=512, remaining=10, auto_min_prefill_tokens=256, no_prefill="local")
AUTO = replace(ALWAYS, policy="auto")
NEVER = replace(ALWAYS, policy="never")


def decode(name: str, used: int = 0, sequences: int = 0, serial: int = 0, num_blocks: int = 100) -> DecodeCandidate:
    return DecodeCandidate(Incarnation(name), num_blocks, used, sequences, serial)


def prefill(name: str, tokens: int = 0, serial: int = 0, num_blocks: int = 100) -> PrefillCandidate:
    return PrefillCandidate(Incarnation(name), num_blocks, tokens, serial)


def view(d: list[DecodeCandidate], p: list[PrefillCandidate], links: list[tuple[str, str]] | None = None) -> RoutingView:
    pairs = [(x.worker, y.worker) for x in p for y in d] if links is None else links
    return RoutingView(BLOCK_SIZE, tuple(d), tuple(p), frozenset((Incarnation(a), Incarnation(b)) for a, b in pairs))


def test_each_policy() -> None:
    both = view([decode("d")], [prefill("p")])
    assert choose_route(both, ALWAYS, {}) == Route(RouteKind.RESERVE, Incarnation("d"))
    assert choose_route(both, AUTO, {}) == Route(RouteKind.RESERVE, Incarnation("d"))
    assert choose_route(both, NEVER, {}) == Route(RouteKind.LOCAL, Incarnation("d"))
    assert choose_route(both, replace(AUTO, num_tokens=255), {}) == Route(RouteKind.LOCAL, Incarnation("d"))
    assert choose_route(both, replace(ALWAYS, num_tokens=1), {}) == Route(RouteKind.RESERVE, Incarnation("d"))
    assert choose_route(both, replace(ALWAYS, local_only=True), {}) == Route(RouteKind.LOCAL, Incarnation("d"))


def test_without_a_usable_prefill_worker() -> None:
    alone = view([decode("d")], [prefill("p")], links=[])
    assert choose_route(alone, ALWAYS, {}) == Route(RouteKind.LOCAL, Incarnation("d"), Fallback.NO_PREFILL)
    assert choose_route(alone, AUTO, {}) == Route(RouteKind.LOCAL, Incarnation("d"), Fallback.NO_PREFILL)
    answer = choose_route(alone, replace(ALWAYS, no_prefill="fail"), {})
    assert isinstance(answer, NoRoute)
    assert answer.reason is FailureReason.NO_PREFILL
    # `fail` is a wish of `always` alone
    assert isinstance(choose_route(alone, replace(AUTO, no_prefill="fail"), {}), Route)
    small = view([decode("d")], [prefill("p", num_blocks=31)])
    assert choose_route(small, ALWAYS, {}) == Route(RouteKind.LOCAL, Incarnation("d"), Fallback.NO_PREFILL)


def test_one_token_needs_no_decode_worker() -> None:
    both = view([decode("d")], [prefill("p0", 100), prefill("p1", 50)], links=[])
    assert choose_route(both, replace(ALWAYS, remaining=1), {}) == Route(RouteKind.PREFILL_ONLY, Incarnation("p1"))
    assert choose_route(both, replace(NEVER, remaining=1), {}) == Route(RouteKind.LOCAL, Incarnation("d"))


def test_only_linked_decode_workers_are_reserved_on() -> None:
    two = view([decode("d0"), decode("d1", used=90)], [prefill("p")], links=[("p", "d1")])
    assert choose_route(two, ALWAYS, {}) == Route(RouteKind.RESERVE, Incarnation("d1"))
    assert choose_route(two, NEVER, {}) == Route(RouteKind.LOCAL, Incarnation("d0"))


def test_decode_work_is_relative_to_the_pool_then_sequences_then_who_waited_longest() -> None:
    def pick(*candidates: DecodeCandidate) -> str:
        answer = choose_route(view(list(candidates), []), NEVER, {})
        assert isinstance(answer, Route)
        return answer.worker

    assert pick(decode("a", used=50, num_blocks=100), decode("b", used=60, num_blocks=200)) == "b"
    assert pick(decode("a", used=10, sequences=3), decode("b", used=10, sequences=2)) == "b"
    assert pick(decode("a", serial=7), decode("b", serial=3)) == "b"


def test_too_small_excluded_and_avoided_decode_workers() -> None:
    two = view([decode("a"), decode("b", used=99)], [])
    assert choose_route(two, replace(NEVER, exclude_decode=frozenset({Incarnation("a")})), {}) == Route(
        RouteKind.LOCAL, Incarnation("b")
    )
    assert choose_route(two, replace(NEVER, avoid_decode=frozenset({Incarnation("a")})), {}) == Route(
        RouteKind.LOCAL, Incarnation("b")
    )
    all_avoided = replace(NEVER, avoid_decode=frozenset({Incarnation("a"), Incarnation("b")}))
    assert choose_route(two, all_avoided, {}) == Route(RouteKind.LOCAL, Incarnation("a"))
    assert isinstance(choose_route(view([decode("a", num_blocks=32)], []), NEVER, {}), NoRoute)  # 522 tokens need 33


def test_prefill_goes_where_the_least_is_in_front_and_a_prefix_hit_counts_what_it_saves() -> None:
    two = view([decode("d")], [prefill("p0", 1000), prefill("p1", 700)])
    at = Incarnation("d")
    p0, p1 = Incarnation("p0"), Incarnation("p1")
    assert choose_prefill(two, ALWAYS, at, 0, {}) == PrefillChoice(p1)
    assert choose_prefill(two, ALWAYS, at, 0, {p0: 256}) == PrefillChoice(p1)  # saves less than the imbalance
    assert choose_prefill(two, ALWAYS, at, 0, {p0: 400}) == PrefillChoice(p0)
    assert choose_prefill(two, replace(ALWAYS, exclude_prefill=frozenset({p1})), at, 0, {}) == PrefillChoice(p0)
    assert choose_prefill(two, ALWAYS, Incarnation("other"), 0, {}) == PrefillChoice(None, Fallback.NO_PREFILL)


def test_auto_computes_on_decode_what_its_cache_mostly_holds() -> None:
    one = view([decode("d")], [prefill("p")])
    assert choose_prefill(one, AUTO, Incarnation("d"), 256, {}) == PrefillChoice(Incarnation("p"))
    assert choose_prefill(one, AUTO, Incarnation("d"), 272, {}) == PrefillChoice(None)
    assert choose_prefill(one, ALWAYS, Incarnation("d"), 496, {}) == PrefillChoice(Incarnation("p"))


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_a_burst_between_two_heartbeats_spreads_evenly(workers: int) -> None:
    book = Assignments()
    names = [f"d{index}" for index in range(workers)]
    got: Counter[str] = Counter()
    for number in range(workers * 20):
        candidates = [
            DecodeCandidate(Incarnation(n), 1000, (o := book.of(Incarnation(n))).predicted(0), o.sequences, o.last_serial)
            for n in names
        ]
        answer = choose_route(view(candidates, []), NEVER, {})
        assert isinstance(answer, Route)
        got[answer.worker] += 1
        book.assign(answer.worker, RequestId(str(number)), 4, 0.0, needs_answer=True)
    assert set(got.values()) == {20}


def test_assignments_are_counted_once_whatever_the_heartbeat_knows() -> None:
    book, worker, first, second = Assignments(), Incarnation("p"), RequestId("1"), RequestId("2")
    book.assign(worker, first, 100, 0.0, needs_answer=False)
    assert book.of(worker).predicted(0) == 100
    book.heartbeat(worker, 0.5)  # reports first's 100 tokens
    book.assign(worker, second, 50, 0.6, needs_answer=False)
    assert book.of(worker).predicted(100) == 150
    book.end(worker, first)
    assert book.of(worker).predicted(100) == 50  # the heartbeat is older than the end
    book.heartbeat(worker, 0.61)  # second may have passed it on the way
    assert book.of(worker).predicted(0) == 50
    book.heartbeat(worker, 1.0)
    assert book.of(worker).predicted(20) == 20
    book.end(worker, second)
    book.end(worker, second)
    assert book.of(worker).predicted(20) == 0
    assert book.is_empty()


def test_a_queued_reservation_counts_until_the_worker_has_answered() -> None:
    book, worker, request = Assignments(), Incarnation("d"), RequestId("1")
    book.assign(worker, request, 8, 0.0, needs_answer=True)
    book.assign(worker, request, 8, 0.1, needs_answer=True)  # Generate behind Reserve, under one id
    book.heartbeat(worker, 1.0)
    assert book.of(worker).predicted(0) == 8
    book.answered(worker, request)
    book.heartbeat(worker, 2.0)
    assert book.of(worker).predicted(8) == 8


@given(st.lists(st.tuples(st.sampled_from("adhe"), st.integers(0, 5), st.integers(1, 9)), max_size=60))
def test_what_ended_leaves_nothing_whatever_the_order(steps: list[tuple[str, int, int]]) -> None:
    book, worker = Assignments(), Incarnation("w")
    live: set[int] = set()
    for now, (step, number, amount) in enumerate(steps):
        request = RequestId(str(number))
        if step == "a":
            book.assign(worker, request, amount, float(now), needs_answer=amount % 2 == 0)
            live.add(number)
        elif step == "d":
            book.answered(worker, request)
        elif step == "h":
            book.heartbeat(worker, float(now))
        else:
            book.end(worker, request)
            live.discard(number)
        assert book.of(worker).sequences == len(live)
        assert book.of(worker).unseen >= 0
    for number in range(6):
        book.end(worker, RequestId(str(number)))
    book.heartbeat(worker, 1e6)
    assert book.is_empty()
    assert book.of(worker).predicted(0) == 0


def test_the_prefix_index_counts_leading_blocks_is_bounded_and_forgets() -> None:
    index = PrefixIndex(max_blocks=6)
    a, b = Incarnation("a"), Incarnation("b")
    long, short = list(block_hashes(range(64), 16)), list(block_hashes(range(32), 16))
    index.record(long, a)
    index.record(short, b)
    assert index.match(long, (a, b)) == {a: 4, b: 2}
    assert index.match(long, (b,)) == {b: 2}
    assert index.match(block_hashes(range(64), 16, "salt"), (a, b)) == {}
    index.forget(b)
    assert index.match(long, (a, b)) == {a: 4}
    index.record(block_hashes(range(100, 164), 16), b)
    assert len(index) == 6  # least recently used ones are out
    index.forget(a)
    index.forget(b)
    assert len(index) == 0
