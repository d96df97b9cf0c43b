"""The thread that runs steps. Only frozen values cross its border: commands in, events out.

submit ──▶ inbox ──▶ handle all that is there ──▶ plan ──▶ execute ──▶ apply ──▶ on_events ──┐
             ▲                                     │ nothing to run                          │
             └─── block until a command comes ◀────┘                        again ◀──────────┘
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from engine.core import EngineCore
from engine.errors import EngineError
from engine.messages import EngineCommand, EngineEvent, EngineStats
from engine.runner import Runner

OnEvents = Callable[[tuple[EngineEvent, ...]], object]
OnFailure = Callable[[BaseException], object]


class EngineThread:
    """Drives one core and one runner.

    A runner that raises costs the sequences of that step; an error anywhere else ends the thread: it is kept in `failure`
    and given to `on_failure`, after the events that had come until then.

    Args:
        on_events: called on this thread, once per command batch and once per step, if there is any event.
        clock: seconds, monotonic.
        on_failure: called on this thread as its last act.
    """

    def __init__(
        self,
        core: EngineCore,
        runner: Runner,
        on_events: OnEvents,
        clock: Callable[[], float] = time.monotonic,
        on_failure: OnFailure | None = None,
    ) -> None:
        self.failure: BaseException | None = None
        self._core = core
        self._runner = runner
        self._on_events = on_events
        self._clock = clock
        self._on_failure = on_failure
        self._inbox: queue.SimpleQueue[EngineCommand | None] = queue.SimpleQueue()  # None only wakes the thread up
        self._stopping = threading.Event()
        self._ready = threading.Event()
        self._stats = core.stats()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Warm the runner up, then run; returns at once."""
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> None:
        """Until the runner is warm.

        Raises:
            TimeoutError: it is not within `timeout_s`.
            EngineError: the thread failed.
        """
        if not self._ready.wait(timeout_s):
            raise TimeoutError(f"the engine is not warm after {timeout_s} s")
        if self.failure is not None:
            raise EngineError("the engine thread failed") from self.failure

    def submit(self, command: EngineCommand) -> None:
        """Any thread. Commands after the thread's end have no effect: its owner knows of it by `stop` or `on_failure`."""
        self._inbox.put(command)

    def stats(self) -> EngineStats:
        """Any thread: as of the last step or command batch."""
        return self._stats

    def stop(self, timeout_s: float) -> None:
        """End the thread after the step that runs now; sequences are left as they are.

        Raises:
            TimeoutError: the step did not end within `timeout_s`.
        """
        self._stopping.set()
        self._inbox.put(None)
        if self._thread.ident is None:
            return  # never started
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine thread is still in a step after {timeout_s} s")

    # -- on the engine thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._runner.warm_up()
            self._ready.set()
            while not self._stopping.is_set():
                self._handle_commands(self._waiting_commands())
                if not self._stopping.is_set() and not self._run_step():
                    self._core.check_conservation()
                    self._handle_commands([self._inbox.get()])
        except BaseException as error:
            self.failure = error
            self._ready.set()
            logging.getLogger(__name__).critical("the engine thread failed", exc_info=error)
            if self._on_failure is not None:
                self._on_failure(error)

    def _waiting_commands(self) -> list[EngineCommand | None]:
        commands = []
        while True:
            try:
                commands.append(self._inbox.get_nowait())
            except queue.Empty:
                return commands

    def _handle_commands(self, commands: list[EngineCommand | None]) -> None:
        events: list[EngineEvent] = []
        try:
            for command in commands:
                if command is not None:
                    events += self._core.handle(command, self._clock())
        finally:
            self._publish(events)

    def _run_step(self) -> bool:
        """False: nothing to run."""
        plan = self._core.plan(self._clock())
        if plan is None:
            return False
        try:
            result = self._runner.execute(plan)
        except Exception as error:
            logging.getLogger(__name__).error("step %d failed", plan.step, exc_info=error)
            self._publish(self._core.fail_step(plan, error, self._clock()))
        else:
            self._publish(self._core.apply(plan, result, self._clock()))
        return True

    def _publish(self, events: list[EngineEvent]) -> None:
        self._stats = self._core.stats()
        if events:
            self._on_events(tuple(events))
