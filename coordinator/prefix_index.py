"""Which worker probably holds which prompt prefix in its cache: block hash -> workers, bounded, least recently used out.

An approximation on purpose (SGLang's router does the same): workers evict without telling, so a hit is a hint that moves a
choice between equally loaded workers and never something that correctness rests on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable

from wire.block_hash import BlockHash
from wire.ids import Incarnation


class PrefixIndex:
    def __init__(self, max_blocks: int) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks: {max_blocks} is less than 1")
        self._max_blocks = max_blocks
        self._workers: OrderedDict[BlockHash, set[Incarnation]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def record(self, hashes: Iterable[BlockHash], worker: Incarnation) -> None:
        """`worker` computes a prompt whose full blocks have these hashes, first to last."""
        for block in reversed(list(hashes)):  # a prefix outlives what follows it
            workers = self._workers.get(block)
            if workers is None:
                self._workers[block] = {worker}
            else:
                workers.add(worker)
                self._workers.move_to_end(block)
        while len(self._workers) > self._max_blocks:
            self._workers.popitem(last=False)

    def match(self, hashes: Iterable[BlockHash], among: Collection[Incarnation]) -> dict[Incarnation, int]:
        """Leading blocks of the prompt that each of `among` is thought to hold; workers without any are left out."""
        found: dict[Incarnation, int] = {}
        alive = set(among)
        for count, block in enumerate(hashes, start=1):
            alive &= self._workers.get(block, set())
            if not alive:
                break
            for worker in alive:
                found[worker] = count
        return found

    def forget(self, worker: Incarnation) -> None:
        """The worker is gone, and its cache with it."""
        for block in [block for block, workers in self._workers.items() if worker in workers]:
            workers = self._workers[block]
            workers.discard(worker)
            if not workers:
                del self._workers[block]
