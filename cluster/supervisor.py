"""Keeps a local cluster's processes as they are wanted: a sans-IO core, event in, actions out.

Each process has a slot with a name that outlives restarts (``decode-1``):

                      ┌────────────── Exited, unexpectedly ──────────────┐
                      ▼                                                  │
    Begin ──▶     BACKOFF ──Tick, time is up──▶ STARTING ──Ready──▶ READY
       │                                            │ ▲                  │
       └────────────────────────────────────────────┘ └ Begin            │
                                                    └───── Stop ──▶ STOPPING ◀── Stop ──┘
                                                                        └──Exited──▶ GONE

The cluster is coming up until every slot was READY once; a process that ends before that is a failed start, and everything
is stopped. Later a process that ends is started again, with a backoff that doubles up to a limit.
Stopping goes in two stages: the workers, and when all are gone, the coordinator; whoever outlasts its deadline is killed.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from wire.control import Role
from wire.state_machine import StateMachine

COORDINATOR = "coordinator"


class SlotState(enum.Enum):
    IDLE = "idle"
    STARTING = "starting"
    READY = "ready"
    BACKOFF = "backoff"
    STOPPING = "stopping"
    GONE = "gone"


# -- actions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartProcess:
    name: str


@dataclass(frozen=True, slots=True)
class TerminateProcess:
    """SIGTERM: drain, then end."""

    name: str


@dataclass(frozen=True, slots=True)
class KillProcess:
    name: str


@dataclass(frozen=True, slots=True)
class Report:
    """A line for the person at the terminal."""

    text: str


Action = StartProcess | TerminateProcess | KillProcess | Report

# -- events of one slot -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    pass


@dataclass(frozen=True, slots=True)
class Ready:
    pass


@dataclass(frozen=True, slots=True)
class Exited:
    code: int


@dataclass(frozen=True, slots=True)
class Stop:
    pass


@dataclass(frozen=True, slots=True)
class Tick:
    pass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    first_backoff_s: float = 0.5
    max_backoff_s: float = 15.0
    stable_s: float = 30.0  # ready for that long: the next backoff is the first again
    start_s: float = 120.0  # a process that is not ready by then is killed, and counts as having ended
    stop_s: float = 35.0  # from SIGTERM to SIGKILL


class Slot(StateMachine[SlotState, Action]):
    """One process that is to run under one name."""

    def __init__(self, name: str, policy: RestartPolicy) -> None:
        super().__init__(name, SlotState.IDLE)
        self.was_ready = False
        self.deadline: float | None = None  # of the present state
        self._policy = policy
        self._failures = 0
        self._ready_since = 0.0

    def _start(self, event: object, now: float) -> list[Action]:
        self._move(SlotState.STARTING)
        self.deadline = now + self._policy.start_s
        return [StartProcess(self.name)]

    def _on_ready(self, event: Ready, now: float) -> list[Action]:
        again = self.was_ready
        self._move(SlotState.READY)
        self.deadline = None
        self.was_ready = True
        self._ready_since = now
        return [Report(f"{self.name} is ready again")] if again else []

    def _on_unexpected_exit(self, event: Exited, now: float) -> list[Action]:
        if self.state is SlotState.READY and now - self._ready_since >= self._policy.stable_s:
            self._failures = 0
        backoff_s = min(self._policy.first_backoff_s * 2**self._failures, self._policy.max_backoff_s)
        self._failures += 1
        self._move(SlotState.BACKOFF)
        self.deadline = now + backoff_s
        return [Report(f"{self.name} {describe_exit(event.code)}; starting it again in {backoff_s:g} s")]

    def _on_tick(self, event: Tick, now: float) -> list[Action]:
        if self.deadline is None or now < self.deadline:
            return []
        if self.state is SlotState.BACKOFF:
            return self._start(event, now)
        waited_s = self._policy.start_s if self.state is SlotState.STARTING else self._policy.stop_s
        what = "is not ready" if self.state is SlotState.STARTING else "has not ended"
        self.deadline = None  # the kill is sent once; its Exited moves on
        return [Report(f"{self.name} {what} after {waited_s:g} s: killing it"), KillProcess(self.name)]

    def _stop_running(self, event: Stop, now: float) -> list[Action]:
        self._move(SlotState.STOPPING)
        self.deadline = now + self._policy.stop_s
        return [TerminateProcess(self.name)]

    def _end(self, event: object, now: float) -> list[Action]:
        self._move(SlotState.GONE)
        self.deadline = None
        return []

    TABLE: ClassVar = {
        (SlotState.IDLE, Begin): _start,
        (SlotState.IDLE, Stop): _end,
        (SlotState.IDLE, Tick): StateMachine._ignore,
        (SlotState.STARTING, Ready): _on_ready,
        (SlotState.STARTING, Exited): _on_unexpected_exit,
        (SlotState.STARTING, Stop): _stop_running,
        (SlotState.STARTING, Tick): _on_tick,
        (SlotState.READY, Ready): StateMachine._ignore,
        (SlotState.READY, Exited): _on_unexpected_exit,
        (SlotState.READY, Stop): _stop_running,
        (SlotState.READY, Tick): StateMachine._ignore,
        (SlotState.BACKOFF, Ready): StateMachine._ignore,  # of the process that has just ended
        (SlotState.BACKOFF, Stop): _end,
        (SlotState.BACKOFF, Tick): _on_tick,
        (SlotState.STOPPING, Ready): StateMachine._ignore,
        (SlotState.STOPPING, Exited): _end,
        (SlotState.STOPPING, Stop): StateMachine._ignore,
        (SlotState.STOPPING, Tick): _on_tick,
        (SlotState.GONE, Ready): StateMachine._ignore,
        (SlotState.GONE, Stop): StateMachine._ignore,
        (SlotState.GONE, Tick): StateMachine._ignore,
    }


class Phase(enum.Enum):
    COMING_UP = "coming up"
    UP = "up"
    STOPPING_WORKERS = "stopping workers"
    STOPPING_COORDINATOR = "stopping coordinator"
    DOWN = "down"


class Supervisor:
    """All slots of one cluster. Time is the caller's monotonic clock, in seconds."""

    def __init__(self, desired: Mapping[Role, int], policy: RestartPolicy) -> None:
        self.phase = Phase.COMING_UP
        self.failure: str | None = None  # why the start failed
        self._desired = dict(desired)
        self._policy = policy
        self._slots = {COORDINATOR: Slot(COORDINATOR, policy)}

    @property
    def desired(self) -> Mapping[Role, int]:
        return dict(self._desired)

    @property
    def states(self) -> Mapping[str, SlotState]:
        return {name: slot.state for name, slot in self._slots.items()}

    @property
    def settled(self) -> bool:
        """Every wanted process is ready and no other is left."""
        return set(self._slots) == {COORDINATOR, *self._wanted()} and all(
            slot.state is SlotState.READY for slot in self._slots.values()
        )

    def start(self, now: float) -> list[Action]:
        return self._begin([COORDINATOR, *self._wanted()], now)

    def scale(self, desired: Mapping[Role, int], now: float) -> list[Action]:
        """Start missing workers, drain the highest-numbered ones that are too many.

        A worker that is still draining keeps its name until it is gone; wanted again, it is started behind that.
        """
        if self.phase not in (Phase.COMING_UP, Phase.UP):
            return [Report("the cluster is stopping")]
        self._desired |= desired
        wanted = self._wanted()
        actions = self._begin([name for name in wanted if name not in self._slots], now)
        for name in sorted(set(self._slots) - {COORDINATOR, *wanted}, key=natural_order, reverse=True):
            actions += self._slots[name].handle(Stop(), now)
        return actions + self._after_event(now)

    def on_ready(self, name: str, now: float) -> list[Action]:
        slot = self._slots.get(name)
        return [] if slot is None else slot.handle(Ready(), now) + self._after_event(now)

    def on_exit(self, name: str, code: int, now: float) -> list[Action]:
        slot = self._slots[name]
        if self.phase is Phase.COMING_UP and slot.state in (SlotState.STARTING, SlotState.READY):
            return self._fail(slot, code, now)
        if self.phase is Phase.STOPPING_WORKERS and slot.name == COORDINATOR:
            self._let_go(slot, code, now)
            return self._after_event(now)
        return slot.handle(Exited(code), now) + self._after_event(now)

    def on_tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for slot in list(self._slots.values()):
            actions += slot.handle(Tick(), now)
        return actions

    def stop(self, now: float) -> list[Action]:
        """Drain the workers, then the coordinator."""
        if self.phase not in (Phase.COMING_UP, Phase.UP):
            return []
        self.phase = Phase.STOPPING_WORKERS
        actions: list[Action] = []
        for name, slot in self._slots.items():
            if name != COORDINATOR or slot.state is SlotState.BACKOFF:  # nobody is started any more
                actions += slot.handle(Stop(), now)
        return actions + self._after_event(now)

    def kill(self, now: float) -> list[Action]:
        """End everything at once."""
        actions = self.stop(now)
        self.phase = Phase.STOPPING_COORDINATOR
        for slot in self._slots.values():
            actions += slot.handle(Stop(), now)
        kills: list[Action] = [KillProcess(name) for name, slot in self._slots.items() if slot.state is SlotState.STOPPING]
        return [action for action in actions if isinstance(action, Report)] + kills + self._after_event(now)

    def next_wakeup(self) -> float | None:
        """When `on_tick` has something to do."""
        return min((slot.deadline for slot in self._slots.values() if slot.deadline is not None), default=None)

    def _wanted(self) -> list[str]:
        return [worker_name(role, index) for role, count in self._desired.items() for index in range(count)]

    def _begin(self, names: list[str], now: float) -> list[Action]:
        actions: list[Action] = []
        for name in names:
            self._slots.setdefault(name, Slot(name, self._policy))
            actions += self._slots[name].handle(Begin(), now)
        return actions

    def _fail(self, slot: Slot, code: int, now: float) -> list[Action]:
        self.failure = f"{slot.name} {describe_exit(code)} before the cluster was ready"
        self._let_go(slot, code, now)
        return self.stop(now)

    @staticmethod
    def _let_go(slot: Slot, code: int, now: float) -> None:
        """It has ended and is not wanted any more: no signal is due."""
        slot.handle(Stop(), now)
        slot.handle(Exited(code), now)

    def _after_event(self, now: float) -> list[Action]:
        """Forget who is gone, and move on where everybody has arrived."""
        actions: list[Action] = []
        for name in [name for name, slot in self._slots.items() if slot.state is SlotState.GONE]:
            del self._slots[name]
            if self.phase in (Phase.COMING_UP, Phase.UP):
                actions.append(Report(f"{name} has left"))
                if name in self._wanted():
                    actions += self._begin([name], now)
        if self.phase is Phase.COMING_UP and all(slot.was_ready for slot in self._slots.values()):
            self.phase = Phase.UP
        if self.phase is Phase.STOPPING_WORKERS and set(self._slots) <= {COORDINATOR}:
            self.phase = Phase.STOPPING_COORDINATOR
            for slot in list(self._slots.values()):
                actions += slot.handle(Stop(), now)
                if slot.state is SlotState.GONE:
                    del self._slots[slot.name]
        if self.phase is Phase.STOPPING_COORDINATOR and not self._slots:
            self.phase = Phase.DOWN
        return actions


def worker_name(role: Role, index: int) -> str:
    return f"{role.value}-{index}"


def natural_order(name: str) -> tuple[str, int]:
    """``prefill-10`` behind ``prefill-9``."""
    match = re.fullmatch(r"(.*?)(\d*)", name)
    return (match[1], int(match[2] or 0)) if match else (name, 0)


def describe_exit(code: int) -> str:
    """As `subprocess` gives it: negative = killed by that signal."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
