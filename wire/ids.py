"""Names for the things that two processes talk about.

Ids carry no meaning: nothing is ever parsed out of one (routing hidden in request ids is how P2pNccl hangs were made).
"""

from __future__ import annotations

import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
"""One sequence's life, drawn by the coordinator. Never the client's own request id: those may collide."""

HandoffId = NewType("HandoffId", str)
"""One attempt to move one sequence's KV from P to D. A retry draws a new one."""

WorkerId = NewType("WorkerId", str)
"""A worker's stable name, such as ``prefill-0``. Its successor after a restart has the same."""

Incarnation = NewType("Incarnation", str)
"""Drawn at process start, so that a restarted worker is never taken for its predecessor."""

BlockId = NewType("BlockId", int)
"""Index of a block in one worker's KV pool."""


def new_request_id() -> RequestId:
    return RequestId(secrets.token_hex(12))


def new_handoff_id() -> HandoffId:
    return HandoffId(secrets.token_hex(12))


def new_incarnation() -> Incarnation:
    return Incarnation(secrets.token_hex(8))


def new_window_key() -> int:
    """An unguessable key for one hand-off's write window (63 bits: it travels as a signed MessagePack integer)."""
    return secrets.randbits(63)
