"""Checksums of KV blocks: xxh3-64, computed off the event loop (xxhash lets go of the interpreter lock for large inputs)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import xxhash

INLINE_BYTES = 256 * 1024  # about 20 µs of hashing: cheaper than a hop to another thread


def checksums(blocks: Sequence[memoryview]) -> tuple[int, ...]:
    return tuple(xxhash.xxh3_64_intdigest(block) for block in blocks)


async def checksums_off_loop(blocks: Sequence[memoryview]) -> tuple[int, ...]:
    if sum(block.nbytes for block in blocks) <= INLINE_BYTES:
        return checksums(blocks)
    return await asyncio.to_thread(checksums, blocks)
