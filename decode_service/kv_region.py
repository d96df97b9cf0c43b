"""D's KV memory: the pool and the probe slots behind it, registered with every transport that D offers.

0                              pool_bytes            pool_bytes + SCRATCH_BYTES
├ block 0 ┬ block 1 ┬ …        ├ probe slot 0 ┬ …    │
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from decode_service.probe_slots import SCRATCH_BYTES
from transport.base import ByteRange, Region, Transport
from wire.ids import BlockId


class KvRegion:
    """Owns the regions; the first transport that brings memory of its own (shm) provides it for all.

    Args:
        transports: by scheme, in order of preference.
    """

    def __init__(self, transports: Mapping[str, Transport], num_blocks: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.pool_bytes = num_blocks * block_bytes
        nbytes = self.pool_bytes + SCRATCH_BYTES
        self.by_scheme: dict[str, Region] = {}
        memory: memoryview | None = None
        for scheme, transport in sorted(transports.items(), key=lambda item: not item[1].owns_memory):
            region = transport.create_region(nbytes, memory)
            memory = region.memory
            self.by_scheme[scheme] = region
        if memory is None:
            raise ValueError("transports: a decode worker needs at least one")
        self.memory = memory

    @property
    def pool(self) -> memoryview:
        return self.memory[: self.pool_bytes]

    def block(self, block_id: BlockId) -> memoryview:
        return self.memory[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]

    def open_window(self, key: int, block_ids: Sequence[BlockId]) -> None:
        """Let holders of `key` write these blocks, by whatever transport."""
        ranges = [ByteRange(block_id * self.block_bytes, self.block_bytes) for block_id in block_ids]
        for region in self.by_scheme.values():
            region.open_window(key, ranges)

    def close_window(self, key: int) -> None:
        for region in self.by_scheme.values():
            region.close_window(key)

    def close(self) -> None:
        """No writer may be left."""
        # Wrapping regions first, then the one that owns the memory.
        for region in reversed(self.by_scheme.values()):
            region.close()
