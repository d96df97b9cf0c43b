"""Scratch ranges behind the KV pool, one per prefill worker that is just proving its link with a probe hand-off."""

from __future__ import annotations

from transport.base import ByteRange

PROBE_BYTES = 256 * 1024
NUM_SLOTS = 16
SCRATCH_BYTES = PROBE_BYTES * NUM_SLOTS


class ProbeSlots:
    def __init__(self, offset: int) -> None:
        self._free = [ByteRange(offset + slot * PROBE_BYTES, PROBE_BYTES) for slot in range(NUM_SLOTS)]

    def take(self) -> ByteRange | None:
        """A slot for one prober, who gives it back; None when all are taken."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: ByteRange) -> None:
        self._free.append(slot)
