"""Who has which block of the KV pool.

    free ──allocate──▶ held ──release, not in the cache──▶ free
                        │ ▲
        release, cached │ │ hold (a prefix hit)
                        ▼ │
                       cached ──allocate evicts the least recently released──▶ held

A block is held while its reference count is above zero; several sequences may hold one. Only full blocks, whose content
never changes any more, enter the prefix cache, under the chained hash of all tokens up to their end
(`wire.block_hash`; 256 bits, so that an equal hash means equal tokens). A cached block may be held at the same time.

Source: reference counts and hash lookup as in vLLM's automatic prefix caching; eviction in LRU order, and of one
sequence's blocks the last first, since nothing can be found behind a missing block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine.errors import ConservationError, OutOfBlocks
from wire.block_hash import BlockHash
from wire.ids import BlockId


class BlockPool:
    """Hands out block ids; knows nothing of their memory. Who takes blocks (`allocate`, `hold`) must `release` them."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free = [BlockId(index) for index in reversed(range(num_blocks))]  # a stack: reuse what is warm
        self._hash_of: dict[BlockId, BlockHash] = {}
        self._block_of: dict[BlockHash, BlockId] = {}
        self._evictable: OrderedDict[BlockId, None] = OrderedDict()  # cached and not held, least recently released first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks in the prefix cache that nobody holds: evicted on demand."""
        return len(self._evictable)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free) - len(self._evictable)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._evictable)

    def find(self, hashes: Sequence[BlockHash]) -> tuple[BlockId, ...]:
        """The cached blocks of the longest prefix of `hashes`. They are not held yet: call `hold` before anything else."""
        found = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return tuple(found)

    def num_available_without(self, blocks: Iterable[BlockId]) -> int:
        """Blocks that could still be allocated once `blocks`, which are cached, are held."""
        return self.num_available - sum(self._references[block] == 0 for block in blocks)

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """Share cached blocks; the caller owns one reference to each."""
        for block in blocks:
            if self._references[block] == 0:
                del self._evictable[block]
            self._references[block] += 1

    def allocate(self, count: int) -> tuple[BlockId, ...]:
        """Blocks for new content; the caller owns the only reference to each.

        Raises:
            OutOfBlocks: fewer than `count` are available; nothing was taken.
        """
        if count > self.num_available:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_available} available of {self.num_blocks}")
        taken = tuple(self._free.pop() if self._free else self._evict() for _ in range(count))
        for block in taken:
            self._references[block] = 1
        return taken

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Give back one reference to each of a sequence's blocks, given in the order of its tokens."""
        for block in reversed(blocks):
            if self._references[block] == 0:
                raise ConservationError(f"block {block} was released more often than it was taken")
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            if block in self._hash_of:
                self._evictable[block] = None
            else:
                self._free.append(block)

    def publish(self, block: BlockId, block_hash: BlockHash) -> None:
        """Make a held block findable. Call it once the block's KV is in memory. Of two blocks with equal content, the first
        stays the findable one."""
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def check_conservation(self, holders: Iterable[Sequence[BlockId]]) -> None:
        """Prove that free + cached + held = total, and that `holders`, the block tables of all who hold any, account for
        every reference.

        Raises:
            ConservationError: a block is lost, held without a holder, or in two states at once.
        """
        expected = [0] * self.num_blocks
        for table in holders:
            for block in table:
                expected[block] += 1
        if expected != self._references:
            wrong = [
                f"block {block}: {have} references, {want} holders"
                for block, (have, want) in enumerate(zip(self._references, expected, strict=True))
                if have != want
            ]
            raise ConservationError("; ".join(wrong[:8]))
        idle = [*self._free, *self._evictable]
        num_held = self.num_blocks - self._references.count(0)
        if len(idle) + num_held != self.num_blocks or len(set(idle)) != len(idle) or any(self._references[b] for b in idle):
            raise ConservationError(
                f"free {self.num_free} + cached {self.num_cached} + held {num_held} is not {self.num_blocks} distinct blocks"
            )
        if {block: found for found, block in self._block_of.items()} != self._hash_of or not (
            self._evictable.keys() <= self._hash_of.keys()
        ):
            raise ConservationError("the prefix cache's two directions differ")

    def _evict(self) -> BlockId:
        block, _ = self._evictable.popitem(last=False)
        del self._block_of[self._hash_of.pop(block)]
        return block
