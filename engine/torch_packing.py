"""Blocks of floating-point KV as int8 or float8, by torch.

Symmetric quantisation with the largest magnitude of each vector of `head_dim` as its scale: for keys and values per token,
as KIVI (Liu et al., 2024) has it for values; at 8 bits it does for keys as well (`benchmarks/kv_wire_quality.py`).
"""

from __future__ import annotations

import torch

from engine.kv_packing import packed_bytes
from engine.kv_pool import TORCH_DTYPES
from wire.kv_layout import KvLayout

_QUANTISED = {"int8": torch.uint8, "fp8": torch.float8_e4m3fn}
_LARGEST = {"int8": 127.0, "fp8": 448.0}
_ZERO = {"int8": 128.0, "fp8": 0.0}  # the byte that stands for 0
_SERIAL_NUMBERS = 16384  # torch computes so many on the calling thread: its other threads are the engine's


class TorchPacker:
    """An `engine.kv_packing.BlockPacker`."""

    def __init__(self, name: str, layout: KvLayout) -> None:
        self.name = name
        self.packed_bytes = packed_bytes(layout)
        self._dtype = TORCH_DTYPES[layout.dtype]
        self._dim = layout.head_dim
        self._vectors = layout.block_bytes // (self._dtype.itemsize * self._dim)
        self._at_once = max(1, _SERIAL_NUMBERS // self._dim)
        self._quantised = _QUANTISED[name]
        self._largest = _LARGEST[name]
        self._zero = _ZERO[name]

    @torch.inference_mode()
    def pack(self, block: memoryview) -> memoryview:
        source = torch.frombuffer(block, dtype=self._dtype).view(self._vectors, self._dim)
        packed = torch.empty(self.packed_bytes, dtype=torch.uint8)
        scales, values = self._parts(packed)
        for rows, scale, value in zip(*(torch.split(part, self._at_once) for part in (source, scales, values)), strict=True):
            numbers = rows.float()
            scale.copy_(numbers.abs().amax(1) / self._largest)
            scale.masked_fill_(scale == 0, 1.0)  # zeros stay zeros
            scaled = (numbers / scale[:, None]).clamp_(-self._largest, self._largest)
            # The conversion to whole numbers cuts off: half a step more, and it rounds (torch's round takes every thread).
            value.copy_(scaled.add_(self._zero + 0.5) if self._zero else scaled)
        return packed.numpy().data

    @torch.inference_mode()
    def unpack(self, packed: memoryview) -> memoryview:
        scales, values = self._parts(torch.frombuffer(packed, dtype=torch.uint8))
        block = torch.empty(self._vectors, self._dim, dtype=self._dtype)
        for rows, scale, value in zip(*(torch.split(part, self._at_once) for part in (block, scales, values)), strict=True):
            rows.copy_(value.float().sub_(self._zero).mul_(scale[:, None]))
        return block.view(torch.uint8).flatten().numpy().data

    def _parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(scales [vectors], values [vectors, dim])"""
        scales = packed[: 4 * self._vectors].view(torch.float32)
        values = packed[4 * self._vectors :].view(self._quantised).view(self._vectors, self._dim)
        return scales, values
