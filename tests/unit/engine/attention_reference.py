"""A naive attention, and a run of random steps that any paged kernel must give the same results for."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from engine.attention import AttentionKernel, SequenceRows
from engine.decoder_config import Activation, LayerConfig, ModelConfig
from engine.kv_pool import TORCH_DTYPES, KvPool
from wire.kv_layout import KvLayout


@dataclass(frozen=True)
class Shape:
    kv_heads: int
    group: int
    dim: int
    block_size: int
    windows: tuple[int | None, ...]
    softcap: float | None

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            family="llama",
            vocab_size=1,
            hidden_size=1,
            intermediate_size=1,
            num_heads=self.kv_heads * self.group,
            num_kv_heads=self.kv_heads,
            head_dim=self.dim,
            layers=tuple(LayerConfig(rope=None, window=window) for window in self.windows),
            max_model_len=4096,
            eos_token_ids=(),
            default_dtype="float32",
            attention_scale=self.dim**-0.5,
            norm_eps=1e-6,
            activation=Activation.SILU,
            tied_head=True,
            attention_softcap=self.softcap,
        )


def naive(shape: Shape, q: Tensor, k: Tensor, v: Tensor, start: int, window: int | None) -> Tensor:
    """q: [n, head, dim] from position `start`; k, v: [start + n, kv_head, dim] -> [n, head × dim], in float64."""
    k, v = (x.double().repeat_interleave(shape.group, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,shd->hns", q.double(), k) * shape.dim**-0.5
    if shape.softcap is not None:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    queries = torch.arange(start, start + q.shape[0]).view(-1, 1)
    keys = torch.arange(k.shape[0]).view(1, -1)
    hidden = keys > queries if window is None else (keys > queries) | (keys <= queries - window)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hns,shd->nhd", weights, v).reshape(q.shape[0], -1)


shapes = st.builds(
    Shape,
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    dim=st.sampled_from([4, 8, 16]),
    block_size=st.sampled_from([1, 4, 16]),
    windows=st.lists(st.one_of(st.none(), st.integers(1, 40)), min_size=1, max_size=2).map(tuple),
    softcap=st.sampled_from([None, 3.0]),
)
# For each sequence the sizes of its steps; a step of 1 is a decode row.
chunkings = st.lists(st.lists(st.one_of(st.just(1), st.integers(1, 50)), min_size=1, max_size=4), min_size=1, max_size=5)


def check_any_batch(
    kernel_of: Callable[[ModelConfig, KvPool], AttentionKernel],
    shape: Shape,
    chunking: list[list[int]],
    seed: int,
    dtype: str = "float32",
    tolerance: float = 1e-4,
) -> None:
    """Runs every sequence's chunks, those with the same number in one batch; the pool is full of NaN before."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [sum(sizes) for sizes in chunking]
    data = [
        [
            torch.randn(len(shape.windows), length, heads, shape.dim, generator=generator).to(TORCH_DTYPES[dtype])
            for heads in (shape.kv_heads * shape.group, shape.kv_heads, shape.kv_heads)
        ]
        for length in lengths
    ]
    layout = KvLayout(len(shape.windows), shape.kv_heads, shape.dim, shape.block_size, dtype)
    needed = [layout.blocks_for(length) for length in lengths]
    free = list(range(sum(needed) + 1))
    random.Random(seed).shuffle(free)
    tables = [tuple(free.pop() for _ in range(count)) for count in needed]
    pool = KvPool(layout, memoryview(bytearray(b"\xff" * (layout.block_bytes * (sum(needed) + 1)))), sum(needed) + 1)  # NaN
    kernel = kernel_of(shape.config, pool)
    done = [0] * len(chunking)
    for number in range(max(map(len, chunking))):
        # All sequences that have a step left run in one batch.
        active = [index for index, sizes in enumerate(chunking) if number < len(sizes)]
        rows, first = [], 0
        for index in active:
            size = chunking[index][number]
            rows.append(SequenceRows(first, size, done[index], tables[index]))
            first += size
        step = kernel.begin(rows)
        for layer, window in enumerate(shape.windows):
            q, k, v = (
                torch.cat([data[i][which][layer, done[i] : done[i] + chunking[i][number]] for i in active])
                for which in range(3)
            )
            step.write(layer, k, v)
            output = step.attend(layer, q)
            for index, row in zip(active, rows, strict=True):
                end = row.start + row.num_tokens
                expected = naive(
                    shape,
                    data[index][0][layer, row.start : end],
                    data[index][1][layer, :end],
                    data[index][2][layer, :end],
                    row.start,
                    window,
                )
                torch.testing.assert_close(
                    output[row.first_row : row.first_row + row.num_tokens].double(),
                    expected,
                    rtol=tolerance,
                    atol=tolerance / 10,
                )
        for index in active:
            done[index] += chunking[index][number]
