"""The stages of a process: start → ready → drain with a deadline → stop.

    STARTING ──ready()──▶ READY ──SIGTERM/SIGINT──▶ DRAINING ──main returns──▶ STOPPED
        └──────── SIGTERM/SIGINT: main is cancelled ─────────────────────────────▲
                              DRAINING, deadline passed or second signal: main is cancelled, then the process ends

A main looks like this; leaving an `async with` is its stop stage, on every way out:

    async def serve(lifecycle: Lifecycle) -> int:
        async with Service(settings) as service:       # start
            lifecycle.ready()
            await lifecycle.stop_requested()            # or whatever else may end it
            await service.drain(lifecycle.drain_deadline)
        return 0

    sys.exit(Lifecycle(drain_s=30).run(serve))
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import signal
from collections.abc import Awaitable, Callable

from service_kit.notify import READY, STOPPING, notify

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 5.0
"""How long a cancelled main may clean up before the process ends regardless."""
DRAIN_GRACE_S = 2.0
"""How long behind the drain deadline a main may take to notice it."""


class Stage(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


class Lifecycle:
    def __init__(self, drain_s: float) -> None:
        self.stage = Stage.STARTING
        self._drain_s = drain_s
        self._stop = asyncio.Event()
        self._drain_deadline: float | None = None
        self._main: asyncio.Task[int] | None = None
        self._exit_code: int | None = None  # set where a signal, not main, decides it

    @property
    def drain_deadline(self) -> float:
        """Moment of the loop's clock at which draining must be over. Only once a stop was requested."""
        if self._drain_deadline is None:
            raise RuntimeError("no stop has been requested")
        return self._drain_deadline

    def ready(self) -> None:
        """The process can do its work now; whoever started it is told."""
        if self.stage is Stage.STARTING:
            self.stage = Stage.READY
            notify(READY)

    def request_stop(self, reason: str) -> None:
        """Begin to drain (a process that has not started up has nothing to drain and is cancelled)."""
        if self._stop.is_set() or self._main is None:
            return
        logger.info("stopping: %s", reason)
        notify(STOPPING)
        loop = asyncio.get_running_loop()
        self._drain_deadline = loop.time() + self._drain_s
        self._stop.set()
        if self.stage is Stage.STARTING:
            self._cancel(0)
            return
        self.stage = Stage.DRAINING
        loop.call_at(self._drain_deadline + DRAIN_GRACE_S, self._cancel, 1)

    async def stop_requested(self) -> None:
        """Returns when the process shall drain."""
        await self._stop.wait()

    def run(
        self,
        main: Callable[[Lifecycle], Awaitable[int]],
        loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    ) -> int:
        """Run `main` to its end under signal handlers; returns the process' exit code.

        0 after a drain in time, 1 after one that was cut short, 128 + signal number after a second signal, else what
        `main` returned. An exception of `main` is raised.
        """
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(self._supervise(main))

    async def _supervise(self, main: Callable[[Lifecycle], Awaitable[int]]) -> int:
        loop = asyncio.get_running_loop()

        async def call_main() -> int:
            return await main(self)

        self._main = loop.create_task(call_main(), name="main")
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            return await self._main
        except asyncio.CancelledError:
            if self._exit_code is None:
                raise
            return self._exit_code
        finally:
            self.stage = Stage.STOPPED
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            logger.warning("%s again: ending at once", number.name)
            self._cancel(128 + number)
        else:
            self.request_stop(number.name)

    def _cancel(self, exit_code: int) -> None:
        if self._main is None or self._main.done():
            return
        self._exit_code = exit_code
        self._main.cancel()
        asyncio.get_running_loop().call_later(CANCEL_GRACE_S, self._end, exit_code)

    def _end(self, exit_code: int) -> None:
        """The last resort for a main that swallows its cancellation."""
        logger.error("the process did not end within %s s of being cancelled", CANCEL_GRACE_S)
        logging.shutdown()
        os._exit(exit_code or 1)
