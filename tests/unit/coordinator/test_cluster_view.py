"""Membership: who is taken, who is lost, which pairs can be used."""

from __future__ import annotations

import pytest
from placement_fakes import worker_info

from coordinator.cluster_view import ClusterView, MemberGone, SendPeers, WorkerState
from coordinator.placement_settings import PlacementSettings
from wire.control import LinkReport, Register, Role, WorkerInfo, WorkerLoad
from wire.ids import Incarnation, WorkerId
from wire.kv_layout import PROTOCOL_VERSION, Fingerprint

SETTINGS = PlacementSettings(cluster_token="secret")


def register(info: WorkerInfo, token: str = "secret", version: int = PROTOCOL_VERSION) -> Register:
    return Register(version, info, token)


def joined(view: ClusterView, info: WorkerInfo, now: float = 0.0) -> list[object]:
    assert view.check(register(info), now) is None
    return [*view.evict_predecessors(info, now), *view.join(info, now)]


def link(view: ClusterView, prefill: str, decode: str, up: bool = True) -> None:
    view.link_report(Incarnation(prefill), LinkReport(WorkerId(decode[:-2]), Incarnation(decode), up, "shm", 3.0))


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (register(worker_info("d1", Role.DECODE), version=PROTOCOL_VERSION + 1), "protocol version"),
        (register(worker_info("d1", Role.DECODE), token="guess"), "cluster token"),
        (register(worker_info("d1", Role.DECODE), token="gueßt"), "cluster token"),
        (register(worker_info("d1", Role.DECODE, model="other")), "model"),
        (register(worker_info("d1", Role.DECODE, block_size=32)), "block_size"),
        (register(worker_info("d1", Role.DECODE, fingerprint=Fingerprint("weights", "packed"))), "fingerprint: layout"),
        (register(worker_info("d1", Role.DECODE, fingerprint=Fingerprint("x", "y"))), "fingerprint: model, layout"),
        (register(worker_info("d1", Role.DECODE, vocab_size=7)), "vocab_size"),
        (register(worker_info("d1", Role.DECODE, num_blocks=0)), "num_blocks"),
        (register(worker_info("", Role.DECODE)), "worker_id"),
    ],
)
def test_a_differing_worker_is_refused_with_the_difference_and_remembered(message: Register, named: str) -> None:
    view = ClusterView(SETTINGS, 0.0)
    joined(view, worker_info("d0", Role.DECODE))

    refusal = view.check(message, 1.0)

    assert refusal is not None
    assert named in refusal.reason
    assert not refusal.retry
    assert [former.reason for former in view.refused.values()] == [refusal.reason]
    assert list(view.members) == ["d0@1"]


def test_what_unaccepted_workers_leave_behind_is_bounded() -> None:
    view = ClusterView(SETTINGS, 0.0)
    for index in range(1000):
        assert view.check(register(worker_info(f"{index}" * 300, Role.DECODE), token="no"), 0.0) is not None
    assert len(view.refused) <= 64
    assert all(len(former.worker_id) <= 100 for former in view.refused.values())


def test_the_configured_model_counts_before_any_worker_is_there() -> None:
    view = ClusterView(PlacementSettings(model="wanted"), 0.0)
    refusal = view.check(register(worker_info("d0", Role.DECODE), token=""), 0.0)
    assert refusal is not None
    assert "wanted" in refusal.reason


def test_a_successor_replaces_its_predecessor_at_once() -> None:
    view = ClusterView(SETTINGS, 0.0)
    joined(view, worker_info("p0", Role.PREFILL))
    joined(view, worker_info("d0", Role.DECODE))
    link(view, "p0@1", "d0@1")

    actions = joined(view, worker_info("d0", Role.DECODE, "d0@2"), 1.0)

    gone = [action for action in actions if isinstance(action, MemberGone)]
    assert [(g.incarnation, g.reason) for g in gone] == [("d0@1", "replaced by its successor")]
    peers = [[peer.incarnation for peer in action.peers.peers] for action in actions if isinstance(action, SendPeers)]
    assert peers == [[], ["d0@2"]]
    assert view.usable_pairs() == frozenset()  # the successor's link is not proved yet
    link(view, "p0@1", "d0@1")  # late
    assert view.usable_pairs() == frozenset()
    link(view, "p0@1", "d0@2")
    assert view.usable_pairs() == {("p0@1", "d0@2")}


def test_the_same_incarnation_may_come_back_and_must_prove_its_links_again() -> None:
    view = ClusterView(SETTINGS, 0.0)
    joined(view, worker_info("p0", Role.PREFILL))
    joined(view, worker_info("d0", Role.DECODE))
    link(view, "p0@1", "d0@1")
    actions = joined(view, worker_info("d0", Role.DECODE), 1.0)
    assert [type(action) for action in actions] == [MemberGone, SendPeers, SendPeers]
    assert view.usable_pairs() == frozenset()
    assert "d0@1" in view.members


def test_silence_ends_a_lease_and_a_heartbeat_keeps_it() -> None:
    view = ClusterView(SETTINGS, 0.0)
    joined(view, worker_info("d0", Role.DECODE))
    joined(view, worker_info("d1", Role.DECODE))
    now, gone = 0.0, []
    while now < 4.0:
        now += 0.25
        view.heard(Incarnation("d0@1"), now)
        gone += [(action.incarnation, now) for action in view.tick(now) if isinstance(action, MemberGone)]
    assert gone == [("d1@1", 3.0)]
    assert (view.former["d1"].state, view.former["d1"].reason) == (WorkerState.LOST, "silent for 3 s")


def test_time_in_which_the_coordinator_stood_still_is_no_workers_silence() -> None:
    view = ClusterView(SETTINGS, 0.0)
    joined(view, worker_info("d0", Role.DECODE))
    assert view.tick(0.1) == []
    assert view.tick(60.0) == []  # the process was suspended
    assert view.tick(60.2) == []
    assert [type(action) for action in view.tick(61.6)] == [MemberGone]  # but it really is silent


def test_draining_takes_no_work_but_stays_a_peer_until_it_is_gone() -> None:
    view = ClusterView(SETTINGS, 0.0)
    joined(view, worker_info("p0", Role.PREFILL))
    joined(view, worker_info("d0", Role.DECODE))
    link(view, "p0@1", "d0@1")
    view.draining(Incarnation("d0@1"))
    assert view.serving(Role.DECODE) == []
    assert view.usable_pairs() == frozenset()
    assert [peer.worker_id for peer in view.decode_peers().peers] == ["d0"]
    assert view.members[Incarnation("d0@1")].state is WorkerState.DRAINING
    actions = view.said_goodbye(Incarnation("d0@1"), 1.0)
    assert [type(action) for action in actions] == [MemberGone, SendPeers]
    assert view.former["d0"].state is WorkerState.LEFT
    assert view.said_goodbye(Incarnation("d0@1"), 1.0) == []
    assert view.links == {}


def test_a_goodbye_without_draining_is_no_leaving_in_order() -> None:
    view = ClusterView(SETTINGS, 0.0)
    joined(view, worker_info("d0", Role.DECODE))
    [gone] = view.said_goodbye(Incarnation("d0@1"), 1.0)  # its engine died
    assert isinstance(gone, MemberGone)
    assert not gone.in_order
    assert view.former["d0"].state is WorkerState.LOST


def test_a_heartbeat_that_says_draining_drains() -> None:
    view = ClusterView(SETTINGS, 0.0)
    joined(view, worker_info("d0", Role.DECODE))
    view.heartbeat(Incarnation("d0@1"), WorkerLoad(draining=True))
    view.heartbeat(Incarnation("d0@1"), WorkerLoad(draining=False))
    assert view.serving(Role.DECODE) == []


def test_a_prefill_worker_starts_until_it_has_proved_a_link_and_a_pair_is_usable_while_it_is_up() -> None:
    view = ClusterView(SETTINGS, 0.0)
    joined(view, worker_info("d0", Role.DECODE))
    actions = joined(view, worker_info("p0", Role.PREFILL))
    assert [action.to for action in actions if isinstance(action, SendPeers)] == [("p0@1",)]
    link(view, "p0@1", "d0@1", up=False)
    assert view.members[Incarnation("p0@1")].state is WorkerState.STARTING
    link(view, "p0@1", "d0@1")
    assert view.members[Incarnation("p0@1")].state is WorkerState.READY
    assert view.usable_pairs() == {("p0@1", "d0@1")}
    link(view, "p0@1", "d0@1", up=False)
    assert view.usable_pairs() == frozenset()
    link(view, "d0@1", "d0@1")  # a decode worker cannot report one
    assert view.usable_pairs() == frozenset()


def test_the_smallest_context_counts() -> None:
    view = ClusterView(SETTINGS, 0.0)
    assert view.max_model_len is None
    joined(view, worker_info("d0", Role.DECODE, max_model_len=100))
    joined(view, worker_info("p0", Role.PREFILL, max_model_len=80))
    assert view.max_model_len == 80


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("policy", "sometimes"),
        ("no_prefill", "retry"),
        ("prefill_failure", "no"),
        ("reserve_timeout_s", 0.0),
        ("lease_s", float("nan")),
        ("failover_wait_s", -1.0),
        ("max_attempts", 0),
        ("max_replays", -1),
        ("max_outstanding", 0),
        ("handoff_lease_s", 1.0),
        ("lease_s", 0.6),
    ],
)
def test_settings_are_checked_and_the_error_names_the_key(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{key}: "):
        PlacementSettings(**{key: value})  # type: ignore[arg-type]


def test_the_cluster_token_is_not_shown() -> None:
    assert "secret" not in repr(SETTINGS)
