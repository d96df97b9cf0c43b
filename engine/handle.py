"""How a service holds an engine."""

from __future__ import annotations

from typing import Protocol

from engine.messages import EngineCommand, EngineStats


class EngineHandle(Protocol):
    """The part of `engine.engine_thread.EngineThread` that a service uses."""

    def submit(self, command: EngineCommand) -> None: ...

    def stats(self) -> EngineStats: ...
