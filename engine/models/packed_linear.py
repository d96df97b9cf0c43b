"""Weights in the compiled kernels' order, laid out once at load in memory with huge pages."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from engine.kernels import structs
from engine.kernels.library import Kernels

_CHUNK_BYTES = 32 * 2**20


class WeightArena:
    """Memory for packed weights. Streaming a model's weights touches every page once a step: with 4 KiB pages the address
    translation alone costs a good part of it, so that the kernel is asked for 2 MiB ones."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, zeroed, at an address that is a multiple of 64."""
        size = -(-num_bytes // 64) * 64
        if size > self._left.numel():
            region = mmap.mmap(-1, max(size, _CHUNK_BYTES))
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel without huge pages
                    region.madvise(mmap.MADV_HUGEPAGE)
            self._left = torch.frombuffer(region, dtype=torch.uint8)
        taken, self._left = self._left[:num_bytes], self._left[size:]
        return taken


class PackedLinear:
    """One matrix, or several over the same input, each packed on its own."""

    def __init__(
        self, kernels: Kernels, arena: WeightArena, weight: Tensor, bias: Tensor | None, parts: Sequence[int] = ()
    ) -> None:
        self._kernels = kernels
        self._dtype = str(weight.dtype).removeprefix("torch.")
        sizes = list(parts) or [weight.shape[0]]
        biases = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
        self._packed: list[tuple[Tensor, Tensor | None]] = []
        self.parts: list[structs.Linear] = []
        for matrix, part_bias in zip(torch.split(weight, sizes), biases, strict=True):
            self._add(arena, matrix.contiguous(), part_bias)

    def _add(self, arena: WeightArena, matrix: Tensor, bias: Tensor | None) -> None:
        num_out, num_in = matrix.shape
        num_panels = -(-num_out // structs.PANEL)
        depth = num_in if matrix.dtype is torch.float32 else -(-num_in // 2) * 2
        packed = arena.take(num_panels * structs.PANEL * depth * matrix.element_size())
        self._kernels.pack(matrix.data_ptr(), packed.data_ptr(), num_out, num_in, self._dtype)
        wide_bias = None
        if bias is not None:
            wide_bias = torch.zeros(num_panels * structs.PANEL)
            wide_bias[:num_out] = bias
        self._packed.append((packed, wide_bias))
        self.parts.append(
            structs.Linear(packed.data_ptr(), None if wide_bias is None else wide_bias.data_ptr(), num_in, num_out)
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out], in x's dtype, on this thread."""
        rows, inputs = x.shape[0], x.float().contiguous()
        outputs = []
        for part in self.parts:
            output = torch.empty(rows, part.num_out)
            scratch = torch.empty(self._kernels.linear_scratch_bytes(part, rows), dtype=torch.uint8)
            self._kernels.linear(part, self._dtype, inputs.data_ptr(), output.data_ptr(), rows, scratch.data_ptr())
            outputs.append(output)
        return (torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0]).to(x.dtype)


class PackedLinears:
    """The factory that the weights' loader calls."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._arena = WeightArena()

    def __call__(self, weight: Tensor, bias: Tensor | None, parts: Sequence[int] = ()) -> PackedLinear:
        return PackedLinear(self._kernels, self._arena, weight, bias, parts)
