"""Compiles grammars before the engine hears of their sequences, so that no step waits for it.

    submit(Add or Reserve with a grammar that is not prepared) ──▶ held ──▶ a thread prepares it ──▶ engine
    submit(anything else of a held sequence) ─────────────────────▶ held behind it
    submit(any other) ─────────────────────────────────────────────────────────────────────────────▶ engine

Commands of one sequence keep their order; those of different sequences have none to keep.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from engine.handle import EngineHandle
from engine.messages import Add, EngineCommand, EngineStats, Reserve
from wire.ids import RequestId

_THREADS = 2


class PreparesGrammars(Protocol):
    """The part of `engine.grammars.Grammars` that is used here."""

    def is_prepared(self, grammar: str) -> bool: ...

    def prepare(self, grammar: str) -> None:
        """Slow; any thread. Never raises: what is wrong with it is told where its sequence starts."""


class GrammarAhead:
    """An `EngineHandle` in front of another one. Everything is called on the event loop.

    Args:
        grammars: None: the engine rejects grammars, and nothing is to be prepared.
    """

    def __init__(self, engine: EngineHandle, grammars: PreparesGrammars | None) -> None:
        self._engine = engine
        self._grammars = grammars
        self._held: dict[RequestId, list[EngineCommand]] = {}
        self._futures: dict[str, asyncio.Future[None]] = {}  # of what is being prepared, by grammar
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="ThreadPoolExecutor-grammar")

    def submit(self, command: EngineCommand) -> None:
        if isinstance(command, Add | Reserve):
            request_id, grammar = command.spec.request_id, command.spec.grammar
        else:
            request_id, grammar = command.request_id, ""
        held = self._held.get(request_id)
        if held is not None:
            held.append(command)
        elif not grammar or self._grammars is None or self._grammars.is_prepared(grammar):
            self._engine.submit(command)
        else:
            self._held[request_id] = [command]
            self._preparing(grammar, self._grammars).add_done_callback(lambda _: self._forward(request_id))

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def close(self) -> None:
        """What is held then is dropped: the engine has stopped."""
        self._held.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _preparing(self, grammar: str, grammars: PreparesGrammars) -> asyncio.Future[None]:
        """One future for all that wait for it."""
        future = self._futures.get(grammar)
        if future is None:
            future = asyncio.get_running_loop().run_in_executor(self._threads, grammars.prepare, grammar)
            self._futures[grammar] = future
            future.add_done_callback(lambda done: self._futures.pop(grammar))
        return future

    def _forward(self, request_id: RequestId) -> None:
        for command in self._held.pop(request_id, []):
            self._engine.submit(command)
