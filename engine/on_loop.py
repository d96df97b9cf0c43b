"""An engine beside an event loop: made and warmed up without blocking it, heard on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from engine.build import EngineOptions, EngineShape, build_engine
from engine.engine_thread import EngineThread
from engine.messages import EngineEvent

WARM_S = 300.0
STOP_S = 10.0


async def build_engine_on_loop(
    options: EngineOptions,
    shape: EngineShape,
    kv_memory: memoryview,
    on_events: Callable[[tuple[EngineEvent, ...]], object],
    on_failure: Callable[[BaseException], object],
) -> EngineThread:
    """As `build_engine`; both callbacks are called on the running loop."""
    loop = asyncio.get_running_loop()
    return await asyncio.to_thread(
        build_engine,
        options,
        shape,
        kv_memory,
        lambda events: loop.call_soon_threadsafe(on_events, events),
        lambda error: loop.call_soon_threadsafe(on_failure, error),
    )


@asynccontextmanager
async def running_engine(engine: EngineThread) -> AsyncIterator[None]:
    """Run it for the length of the block, which begins when it is warm.

    Raises:
        TimeoutError: it did not warm up, or did not stop, in time.
        EngineError: it failed while warming up.
    """
    engine.start()
    try:
        await asyncio.to_thread(engine.wait_ready, WARM_S)
        yield
    finally:
        engine.stop(STOP_S)
