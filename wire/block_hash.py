"""Chained hashes of a prompt's full blocks: equal hash = equal tokens from the start of the sequence on.

Source: vLLM's automatic prefix caching (chained block hashes), with the root seeded by explicit bytes instead of Python's
per-process `hash`, so that every process of a cluster computes the same values. BLAKE2b with 256 bits: a collision would
hand one user's KV to another, so a fast non-cryptographic hash is not good enough here.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from typing import NewType

BlockHash = NewType("BlockHash", bytes)

_ROOT_TAG = b"kvrelay block chain 1"
_TOKEN_TYPECODE = "I"  # 4 bytes on every platform that CPython supports


def root_hash(block_size: int, cache_salt: str = "") -> BlockHash:
    """The parent of every first block; differs by block size and salt (lengths are prefixed: parts cannot run together)."""
    salt = cache_salt.encode()
    digest = hashlib.blake2b(_ROOT_TAG, digest_size=32)
    digest.update(block_size.to_bytes(4, "little") + len(salt).to_bytes(4, "little") + salt)
    return BlockHash(digest.digest())


def child_hash(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    """Hash of one full block that follows `parent`."""
    return BlockHash(hashlib.blake2b(parent + array(_TOKEN_TYPECODE, tokens).tobytes(), digest_size=32).digest())


def block_hashes(tokens: Sequence[int], block_size: int, cache_salt: str = "") -> Iterator[BlockHash]:
    """Hashes of the full blocks of `tokens`, first to last; a trailing partial block has none."""
    parent = root_hash(block_size, cache_salt)
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = child_hash(parent, tokens[start : start + block_size])
        yield parent
