"""An engine beside an event loop: made and warmed up without blocking it, heard on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from engine.build import EngineOptions, EngineShape, build_engine
from engine.engine_thread import EngineThread
from engine.grammar_ahead import GrammarAhead
from engine.grammars import Grammars
from engine.messages import EngineCommand, EngineEvent, EngineStats

WARM_S = 300.0
STOP_S = 10.0


class EngineOnLoop:
    """Implements `engine.handle.EngineHandle`: an engine thread, and the threads that compile grammars for it."""

    def __init__(self, thread: EngineThread, grammars: Grammars | None) -> None:
        self.thread = thread
        self.ahead = GrammarAhead(thread, grammars)

    def submit(self, command: EngineCommand) -> None:
        self.ahead.submit(command)

    def stats(self) -> EngineStats:
        return self.thread.stats()


async def build_engine_on_loop(
    options: EngineOptions,
    shape: EngineShape,
    kv_memory: memoryview,
    on_events: Callable[[tuple[EngineEvent, ...]], object],
    on_failure: Callable[[BaseException], object],
) -> EngineOnLoop:
    """As `build_engine`; both callbacks are called on the running loop."""
    loop = asyncio.get_running_loop()
    grammars = await asyncio.to_thread(Grammars.load, shape.model_dir, shape.vocab_size)
    thread = await asyncio.to_thread(
        build_engine,
        options,
        shape,
        kv_memory,
        lambda events: loop.call_soon_threadsafe(on_events, events),
        lambda error: loop.call_soon_threadsafe(on_failure, error),
        grammars,
    )
    return EngineOnLoop(thread, grammars)


@asynccontextmanager
async def running_engine(engine: EngineOnLoop) -> AsyncIterator[None]:
    """Run it for the length of the block, which begins when it is warm.

    Raises:
        TimeoutError: it did not warm up, or did not stop, in time.
        EngineError: it failed while warming up.
    """
    engine.thread.start()
    try:
        await asyncio.to_thread(engine.thread.wait_ready, WARM_S)
        yield
    finally:
        engine.ahead.close()
        engine.thread.stop(STOP_S)
