"""The compiled attention kernel alone, behind the interface of `engine.attention.AttentionKernel`: for tests."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention import SequenceRows, blocks_begun
from engine.decoder_config import ModelConfig
from engine.kernels import structs
from engine.kernels.library import Kernels
from engine.kv_pool import KvPool


class CompiledAttention:
    """Writes and attends in one call: `write` only keeps what `attend` then gives to the kernel."""

    def __init__(self, config: ModelConfig, pool: KvPool, kernels: Kernels, threads: int = 1) -> None:
        self.config, self.pool, self.kernels, self.threads = config, pool, kernels, threads

    def begin(self, sequences: Sequence[SequenceRows]) -> CompiledStep:
        self.pool.clear(blocks_begun(sequences, self.pool.layout.block_size))
        return CompiledStep(self, sequences)


class CompiledStep:
    def __init__(self, attention: CompiledAttention, sequences: Sequence[SequenceRows]) -> None:
        self._owner = attention
        self._sequences, self._block_ids = array("i"), array("i")
        for each in sequences:
            self._sequences.extend((each.first_row, each.num_tokens, each.start, len(self._block_ids)))
            self._block_ids.extend(each.block_ids)
        self._rows = sum(each.num_tokens for each in sequences)
        self._count = len(sequences)
        self._written: tuple[Tensor, Tensor] | None = None

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._written = (k.float().contiguous(), v.float().contiguous())

    def attend(self, layer: int, q: Tensor) -> Tensor:
        assert self._written is not None
        owner, layout, config = self._owner, self._owner.pool.layout, self._owner.config
        kernels = owner.kernels
        step = structs.Step(
            None, None, self._sequences.buffer_info()[0], self._block_ids.buffer_info()[0], None, None, None, None,
            self._rows, self._count, 0, owner.threads,
        )  # fmt: skip
        model = structs.Model(heads=config.num_heads, kv_heads=config.num_kv_heads, dim=config.head_dim)
        workspace = torch.empty(kernels.workspace_bytes(model, step), dtype=torch.uint8)
        step.workspace = workspace.data_ptr()
        pool = structs.Pool(
            owner.pool.blocks.data_ptr(), layout.num_layers, layout.block_size, layout.num_kv_heads, layout.head_dim
        )
        queries, output = q.float().contiguous(), torch.empty(q.shape)
        k, v = self._written
        call = structs.AttentionCall(
            queries.data_ptr(), k.data_ptr(), v.data_ptr(), output.data_ptr(), layer,
            config.layers[layer].window or 0, config.num_heads, config.attention_scale, config.attention_softcap or 0.0,
        )  # fmt: skip
        kernels.attention(pool, step, call, layout.dtype)
        return output.view(self._rows, -1).to(q.dtype)
