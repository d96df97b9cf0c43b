"""What either end counts of its hand-offs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class HandoffTotals:
    """Since the start of the worker."""

    handoffs: int = 0  # that were delivered
    nbytes: int = 0
    failures: int = 0
    late_messages: int = 0  # about hand-offs that had ended
