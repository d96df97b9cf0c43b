"""KV blocks in fewer bytes for their way from P to D: what both workers agree on, without torch.

A packed block is as many numbers as the block holds, in one byte each, behind one scale (float32) per vector of `head_dim`:

    ┌ scales [layer, k/v, token, head] float32 ┬ values [layer, k/v, token, head, dim] uint8 (128 is 0) or float8 e4m3 ┐

Scales per token rather than one per block: what lies behind a sequence's last token in its last block is left over from
other sequences and must not count.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from wire.kv_layout import DTYPE_BYTES, KvLayout

PACKINGS = ("int8", "fp8")
_SCALE_BYTES = 4


class BlockPacker(Protocol):
    """Packs one layout's blocks. For any thread; computes on the one that calls, and on no other."""

    name: str
    packed_bytes: int  # per block

    def pack(self, block: memoryview) -> memoryview:
        """A block in `packed_bytes` bytes of new memory."""

    def unpack(self, packed: memoryview) -> memoryview:
        """The block again, nearly, in new memory."""


def packed_bytes(layout: KvLayout) -> int:
    numbers = layout.block_bytes // DTYPE_BYTES[layout.dtype]
    return numbers + numbers // layout.head_dim * _SCALE_BYTES


def packers_for(layout: KvLayout) -> Mapping[str, BlockPacker]:
    """By name; none for a cache that holds no floating-point numbers, as the fake runner's. Loads torch otherwise."""
    if layout.dtype == "uint8":
        return MappingProxyType({})
    module: Any = importlib.import_module("engine.torch_packing")
    return MappingProxyType({name: module.TorchPacker(name, layout) for name in PACKINGS})
