"""Attention over the paged pool: what the models call, and the step's geometry that all layers share.

A kernel is a class with two methods, made once per step:

    step = kernel.begin(rows)            rows: which tokens of which sequences this step computes
    step.write(layer, k, v)              k, v: [T, kv_head, dim] of all tokens of the step, into the pool
    step.attend(layer, q) -> [T, head × dim]     q: [T, head, dim]; reads the pool, so call `write` first

`TorchAttention` is the portable one. Another kernel may keep another order inside a block; it then names that order in
`KvLayout.order`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.attention_chunk import ChunkTiles, attend_chunk, tile_chunk
from engine.attention_decode import DecodeBucket, attend_decode, bucket_rows
from engine.cpu_features import has_bfloat16_products
from engine.decoder_config import ModelConfig
from engine.kv_pool import TORCH_DTYPES, KvPool


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's part of a step: its next `num_tokens` tokens from position `start` on, in rows `first_row` onward."""

    first_row: int
    num_tokens: int
    start: int
    block_ids: tuple[int, ...]


class AttentionStep(Protocol):
    def write(self, layer: int, k: Tensor, v: Tensor) -> None: ...

    def attend(self, layer: int, q: Tensor) -> Tensor: ...


class AttentionKernel(Protocol):
    def begin(self, sequences: Sequence[SequenceRows]) -> AttentionStep: ...


class TorchAttention:
    """Plain torch: decode rows batched by padded gather and bmm, prompt chunks tile by tile with an online softmax."""

    def __init__(self, config: ModelConfig, pool: KvPool) -> None:
        self.config = config
        self.pool = pool
        stored = TORCH_DTYPES[pool.layout.dtype]
        emulated = stored is torch.bfloat16 and not has_bfloat16_products()
        self._product_dtype = torch.float32 if emulated else stored

    def begin(self, sequences: Sequence[SequenceRows]) -> AttentionStep:
        return _TorchStep(self.config, self.pool, sequences, self._product_dtype)


class _TorchStep:
    def __init__(
        self, config: ModelConfig, pool: KvPool, sequences: Sequence[SequenceRows], product_dtype: torch.dtype
    ) -> None:
        self._config = config
        self._pool = pool
        self._num_rows = sum(sequence.num_tokens for sequence in sequences)
        self._write_rows = _write_rows(pool, sequences)
        decode = [sequence for sequence in sequences if sequence.num_tokens == 1]
        chunks = [sequence for sequence in sequences if sequence.num_tokens > 1]
        layout, windows = pool.layout, {layer.window for layer in config.layers}
        per_block = layout.num_layers * 2
        self._buckets: dict[int | None, list[DecodeBucket]] = {}
        self._chunks: dict[int | None, list[ChunkTiles]] = {}
        for window in windows:
            self._buckets[window] = bucket_rows(
                [(s.first_row, s.start + 1, s.block_ids) for s in decode], layout.block_size, per_block, window
            )
            self._chunks[window] = [
                tile_chunk(
                    s.first_row, s.num_tokens, s.start, s.block_ids, layout.block_size, per_block, window, product_dtype
                )
                for s in chunks
            ]
        pool.clear(blocks_begun(sequences, layout.block_size))

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        rows = self._pool.token_rows
        rows.index_copy_(0, self._write_rows[layer, 0], k.reshape(self._num_rows, -1))
        rows.index_copy_(0, self._write_rows[layer, 1], v.reshape(self._num_rows, -1))

    def attend(self, layer: int, q: Tensor) -> Tensor:
        config, pool, window = self._config, self._pool, self._config.layers[layer].window
        output = torch.empty(q.shape, dtype=q.dtype)
        arguments = (layer, config.num_kv_heads, config.attention_scale, config.attention_softcap)
        for bucket in self._buckets[window]:
            attend_decode(bucket, pool.block_rows, q, output, *arguments)
        for tiles in self._chunks[window]:
            attend_chunk(tiles, pool.block_rows, q, output, *arguments)
        return output.view(self._num_rows, -1)


def _write_rows(pool: KvPool, sequences: Sequence[SequenceRows]) -> Tensor:
    """[layer, k/v, T] rows of `pool.token_rows` for the step's tokens."""
    layout = pool.layout
    rows_per_kv, rows_per_block = layout.block_size, layout.num_layers * 2 * layout.block_size
    parts = []
    for sequence in sequences:
        positions = torch.arange(sequence.start, sequence.start + sequence.num_tokens)
        first = sequence.start // layout.block_size
        end = -(-(sequence.start + sequence.num_tokens) // layout.block_size)
        blocks = torch.tensor(sequence.block_ids[first:end])
        parts.append(blocks[positions // layout.block_size - first] * rows_per_block + positions % layout.block_size)
    offsets = torch.arange(layout.num_layers * 2).view(layout.num_layers, 2, 1) * rows_per_kv
    return offsets + torch.cat(parts)


def blocks_begun(sequences: Sequence[SequenceRows], block_size: int) -> list[int]:
    """Blocks whose first slot this step writes, but not their last one: at most one for each sequence."""
    begun = []
    for sequence in sequences:
        end = sequence.start + sequence.num_tokens
        last_start = end // block_size * block_size
        if end % block_size and last_start >= sequence.start:
            begun.append(sequence.block_ids[last_start // block_size])
    return begun
