"""The form of every state machine here: an enum of states, one table of (state, event type) → handler, one place that moves.

A pair that the table lacks raises `InvalidTransition` with the history, so that a surprising order of events fails where it
happens. An event that may come late by nature has a row that says so.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

from wire.errors import InvalidTransition

StateT = TypeVar("StateT", bound=enum.Enum)
ActionT = TypeVar("ActionT")

HISTORY_LENGTH = 32


class StateMachine(Generic[StateT, ActionT]):
    """Base: `handle(event, now)` looks the handler up by state and event type and returns its actions.

    Subclasses set `TABLE`, whose values are unbound methods `(self, event, now) -> list[action]`, and change the state by
    `_move` alone.
    """

    TABLE: ClassVar[Mapping[tuple[Any, type], Callable[..., list[Any]]]]

    def __init__(self, name: str, initial: StateT) -> None:
        self.name = name
        self._state = initial
        self._history: deque[str] = deque([initial.name], maxlen=HISTORY_LENGTH)

    @property
    def state(self) -> StateT:
        return self._state

    @property
    def history(self) -> tuple[str, ...]:
        return tuple(self._history)

    def handle(self, event: object, now: float) -> list[ActionT]:
        """
        Raises:
            InvalidTransition: the state does not allow this event; nothing has changed.
        """
        handler = self.TABLE.get((self._state, type(event)))
        if handler is None:
            raise InvalidTransition(self.name, self._state.name, type(event).__name__, self.history)
        self._history.append(type(event).__name__)
        return handler(self, event, now)

    def _move(self, state: StateT) -> None:
        self._state = state
        self._history.append(state.name)

    def _ignore(self, event: object, now: float) -> list[ActionT]:
        """Handler for an event that is late or changes nothing in this state."""
        return []
