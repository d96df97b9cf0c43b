"""Errors of the wire package.

WireError
├── DecodeError          bytes are not a message of this protocol (garbage, unknown tag, wrong field type)
├── ProtocolMismatch     the peer speaks another protocol version, or serves another model or KV layout
└── InvalidTransition    a state machine was given an event that its state does not allow
"""

from __future__ import annotations


class WireError(Exception):
    """Base of every error that this package raises."""


class DecodeError(WireError):
    """The bytes do not decode to a known message."""


class ProtocolMismatch(WireError):
    """Handshake refused; the message names what differs."""


class InvalidTransition(WireError):
    """An event arrived in a state that does not allow it; carries the machine's history."""

    def __init__(self, machine: str, state: str, event: str, history: tuple[str, ...]) -> None:
        super().__init__(f"{machine}: event {event!r} is not allowed in state {state!r}; history: {' > '.join(history)}")
        self.machine = machine
        self.state = state
        self.event = event
        self.history = history
