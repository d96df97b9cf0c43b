from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.supervisor import (
    COORDINATOR,
    Action,
    KillProcess,
    Phase,
    Report,
    RestartPolicy,
    SlotState,
    StartProcess,
    Supervisor,
    TerminateProcess,
)
from wire.control import Role

POLICY = RestartPolicy(first_backoff_s=1.0, max_backoff_s=4.0, stable_s=30.0, start_s=60.0, stop_s=10.0)


def started(prefill: int = 1, decode: int = 1) -> Supervisor:
    supervisor = Supervisor({Role.PREFILL: prefill, Role.DECODE: decode}, POLICY)
    supervisor.start(0.0)
    return supervisor


def up(prefill: int = 1, decode: int = 1) -> Supervisor:
    supervisor = started(prefill, decode)
    for name in supervisor.states:
        supervisor.on_ready(name, 1.0)
    assert supervisor.phase is Phase.UP
    return supervisor


def without_reports(actions: list[Action]) -> list[Action]:
    return [action for action in actions if not isinstance(action, Report)]


def test_a_cluster_comes_up_and_goes_down() -> None:
    # 1. Everything is started at once.
    supervisor = Supervisor({Role.PREFILL: 1, Role.DECODE: 2}, POLICY)
    names = [COORDINATOR, "prefill-0", "decode-0", "decode-1"]
    assert supervisor.start(0.0) == [StartProcess(name) for name in names]
    # 2. It is up when the last one is ready.
    for name in names:
        assert supervisor.phase is Phase.COMING_UP
        supervisor.on_ready(name, 1.0)
    assert supervisor.phase is Phase.UP
    assert supervisor.settled
    assert supervisor.next_wakeup() is None
    # 3. Workers leave first, the coordinator behind the last of them.
    assert supervisor.stop(2.0) == [TerminateProcess(name) for name in names[1:]]
    assert supervisor.on_exit("decode-0", 0, 3.0) == []
    assert supervisor.on_exit("prefill-0", 0, 3.0) == []
    assert supervisor.on_exit("decode-1", 0, 3.0) == [TerminateProcess(COORDINATOR)]
    assert supervisor.on_exit(COORDINATOR, 0, 4.0) == []
    # 4. Everything empty.
    assert supervisor.phase is Phase.DOWN
    assert supervisor.states == {}
    assert supervisor.next_wakeup() is None


def test_a_process_that_ends_before_the_cluster_was_ready_is_a_failed_start() -> None:
    supervisor = started()
    supervisor.on_ready("prefill-0", 1.0)
    assert supervisor.on_exit("decode-0", 3, 1.0) == [TerminateProcess("prefill-0")]
    assert supervisor.failure == "decode-0 ended with code 3 before the cluster was ready"
    assert supervisor.on_exit("prefill-0", 0, 2.0) == [TerminateProcess(COORDINATOR)]
    supervisor.on_exit(COORDINATOR, 0, 2.0)
    assert supervisor.phase is Phase.DOWN


def test_a_coordinator_that_ends_first_takes_the_start_down() -> None:
    supervisor = started()
    actions = supervisor.on_exit(COORDINATOR, 1, 1.0)
    assert actions == [TerminateProcess("prefill-0"), TerminateProcess("decode-0")]
    supervisor.on_exit("prefill-0", 0, 2.0)
    supervisor.on_exit("decode-0", 0, 2.0)
    assert supervisor.phase is Phase.DOWN


def test_a_worker_that_dies_comes_back_under_its_name_with_a_capped_backoff() -> None:
    supervisor = up()
    now = 10.0
    for backoff_s in (1.0, 2.0, 4.0, 4.0):
        # 1. It dies: nothing is started before the backoff is over.
        (report,) = supervisor.on_exit("decode-0", -9, now)
        assert isinstance(report, Report)
        assert "killed by signal 9" in report.text
        assert supervisor.next_wakeup() == now + backoff_s
        assert supervisor.on_tick(now + backoff_s - 0.01) == []
        # 2. It starts again.
        now += backoff_s
        assert supervisor.on_tick(now) == [StartProcess("decode-0")]
        assert not supervisor.settled
        # 3. It is ready, for a moment.
        supervisor.on_ready("decode-0", now)
        assert supervisor.settled
        now += 0.1
    # 4. Once it has been ready for long, the backoff begins anew.
    supervisor.on_exit("decode-0", 1, now + POLICY.stable_s)
    assert supervisor.next_wakeup() == now + POLICY.stable_s + 1.0


def test_a_process_that_never_becomes_ready_is_killed_and_counts_as_ended() -> None:
    supervisor = started()
    supervisor.on_ready(COORDINATOR, 1.0)
    supervisor.on_ready("prefill-0", 1.0)
    assert without_reports(supervisor.on_tick(POLICY.start_s)) == [KillProcess("decode-0")]
    assert supervisor.on_tick(POLICY.start_s + 1) == []
    supervisor.on_exit("decode-0", -9, POLICY.start_s + 1)
    assert supervisor.failure is not None


def test_a_worker_that_does_not_drain_in_time_is_killed() -> None:
    supervisor = up()
    supervisor.stop(2.0)
    assert supervisor.on_tick(11.9) == []
    kills = without_reports(supervisor.on_tick(12.0))
    assert kills == [KillProcess("prefill-0"), KillProcess("decode-0")]


def test_scaling_up_starts_and_down_drains_the_highest_numbers() -> None:
    supervisor = up(1, 2)
    # 1. Up.
    assert supervisor.scale({Role.PREFILL: 3}, 2.0) == [StartProcess("prefill-1"), StartProcess("prefill-2")]
    assert not supervisor.settled
    supervisor.on_ready("prefill-1", 3.0)
    supervisor.on_ready("prefill-2", 3.0)
    assert supervisor.settled
    # 2. Down, in both roles.
    actions = supervisor.scale({Role.PREFILL: 1, Role.DECODE: 1}, 4.0)
    assert actions == [TerminateProcess("prefill-2"), TerminateProcess("prefill-1"), TerminateProcess("decode-1")]
    # 3. One that is wanted again while it drains starts when it is gone.
    assert supervisor.scale({Role.DECODE: 2}, 5.0) == []
    assert without_reports(supervisor.on_exit("decode-1", 0, 6.0)) == [StartProcess("decode-1")]
    supervisor.on_exit("prefill-1", 0, 6.0)
    supervisor.on_exit("prefill-2", 0, 6.0)
    supervisor.on_ready("decode-1", 7.0)
    assert supervisor.settled
    assert set(supervisor.states) == {COORDINATOR, "prefill-0", "decode-0", "decode-1"}


def test_a_worker_in_backoff_that_is_not_wanted_any_more_is_forgotten() -> None:
    supervisor = up(2, 1)
    supervisor.on_exit("prefill-1", 1, 2.0)
    assert without_reports(supervisor.scale({Role.PREFILL: 1}, 2.1)) == []
    assert supervisor.settled


def test_a_cluster_that_stops_is_not_scaled_and_nothing_is_restarted() -> None:
    supervisor = up()
    supervisor.stop(2.0)
    assert without_reports(supervisor.scale({Role.DECODE: 5}, 2.0)) == []
    assert supervisor.on_exit("prefill-0", -9, 2.0) == []
    assert supervisor.stop(2.5) == []


def test_a_second_request_kills() -> None:
    for before in (False, True):
        supervisor = up()
        if before:
            supervisor.stop(2.0)
        kills = supervisor.kill(3.0)
        assert kills == [KillProcess(COORDINATOR), KillProcess("prefill-0"), KillProcess("decode-0")]
        for name in (COORDINATOR, "decode-0", "prefill-0"):
            supervisor.on_exit(name, -9, 3.0)
        assert supervisor.phase is Phase.DOWN


def test_late_news_of_processes_that_are_gone_changes_nothing() -> None:
    supervisor = up()
    assert supervisor.on_ready("prefill-7", 2.0) == []
    supervisor.on_exit("decode-0", 1, 2.0)
    assert supervisor.on_ready("decode-0", 2.0) == []
    assert supervisor.states["decode-0"] is SlotState.BACKOFF


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_story_ends_with_nothing_left(data: st.DataObject) -> None:
    """A model of the outside: which processes run. Whatever happens, stop ends it, within the deadlines."""
    supervisor = Supervisor({Role.PREFILL: 1, Role.DECODE: 1}, POLICY)
    running: set[str] = set()
    now = 0.0

    def execute(actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StartProcess):
                assert action.name not in running, "two processes under one name"
                running.add(action.name)
            elif isinstance(action, TerminateProcess | KillProcess):
                assert action.name in running, "a signal to nobody"

    execute(supervisor.start(now))
    for _ in range(data.draw(st.integers(0, 25))):
        now += data.draw(st.sampled_from([0.0, 0.5, 5.0, 70.0]))
        event = data.draw(st.sampled_from(["ready", "exit", "tick", "scale"]))
        if event == "ready" and running:
            execute(supervisor.on_ready(data.draw(st.sampled_from(sorted(running))), now))
        elif event == "exit" and running:
            name = data.draw(st.sampled_from(sorted(running)))
            running.discard(name)
            execute(supervisor.on_exit(name, 1, now))
        elif event == "tick":
            execute(supervisor.on_tick(now))
        elif event == "scale":
            counts = {Role.PREFILL: data.draw(st.integers(0, 3)), Role.DECODE: data.draw(st.integers(1, 3))}
            execute(supervisor.scale(counts, now))
    execute(supervisor.stop(now))
    while supervisor.phase is not Phase.DOWN:
        wakeup = supervisor.next_wakeup()
        assert running, "waits for nobody"
        if wakeup is not None:
            now = max(now, wakeup)
            for action in supervisor.on_tick(now):
                assert not isinstance(action, StartProcess)
        name = sorted(running)[0]
        running.discard(name)
        execute(supervisor.on_exit(name, 0, now))
    assert running == set()
    assert supervisor.states == {}


@pytest.mark.parametrize(("code", "text"), [(-15, "signal 15"), (2, "code 2")])
def test_exits_are_described(code: int, text: str) -> None:
    supervisor = up()
    (report,) = supervisor.on_exit("prefill-0", code, 2.0)
    assert isinstance(report, Report)
    assert text in report.text
