"""Paged attention against a naive reference: random shapes, windows, caps, chunkings and block tables."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine import attention_chunk
from engine.attention import SequenceRows, TorchAttention
from engine.attention_decode import bucket_rows
from engine.decoder_config import Activation, LayerConfig, ModelConfig
from engine.kv_pool import KvPool
from wire.kv_layout import KvLayout


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    """Tiles so small that short sequences cross every border of them."""
    patch = pytest.MonkeyPatch()
    patch.setattr(attention_chunk, "_TILE_QUERIES", 8)
    patch.setattr(attention_chunk, "_KEYS_AT_ONCE", 16)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    patch.undo()


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


@settings(max_examples=120, deadline=None)
@given(shape=shapes, chunking=chunkings, seed=st.integers(0, 1000))
def test_any_batch_equals_the_naive_reference(shape: Shape, chunking: list[list[int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = [sum(sizes) for sizes in chunking]
    data = [
        [
            torch.randn(len(shape.windows), length, heads, shape.dim, generator=generator)
            for heads in (shape.kv_heads * shape.group, shape.kv_heads, shape.kv_heads)
        ]
        for length in lengths
    ]
    layout = KvLayout(len(shape.windows), shape.kv_heads, shape.dim, shape.block_size, "float32")
    needed = [layout.blocks_for(length) for length in lengths]
    free = list(range(sum(needed) + 1))
    random.Random(seed).shuffle(free)
    tables = [tuple(free.pop() for _ in range(count)) for count in needed]
    pool = KvPool(layout, memoryview(bytearray(b"\xff" * (layout.block_bytes * (sum(needed) + 1)))), sum(needed) + 1)  # NaN
    kernel = TorchAttention(shape.config, pool)
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
                    output[row.first_row : row.first_row + row.num_tokens].double(), expected, rtol=1e-4, atol=1e-5
                )
        for index in active:
            done[index] += chunking[index][number]


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    shape = Shape(kv_heads=2, group=2, dim=8, block_size=4, windows=(None,), softcap=None)
    layout = KvLayout(1, 2, 8, 4, "float32")
    pool = KvPool(layout, memoryview(bytearray(64 * layout.block_bytes)), 64)
    pool.blocks.normal_(generator=torch.Generator().manual_seed(0))
    kernel = TorchAttention(shape.config, pool)
    q = torch.randn(3, 4, 8)
    rows = [
        SequenceRows(0, 1, 30, tuple(range(8))),
        SequenceRows(1, 1, 3, (9,)),
        SequenceRows(2, 1, 90, tuple(range(10, 33))),
    ]
    together = kernel.begin(rows).attend(0, q)
    for row in rows:
        alone = kernel.begin([SequenceRows(0, 1, row.start, row.block_ids)]).attend(0, q[row.first_row : row.first_row + 1])
        torch.testing.assert_close(alone[0], together[row.first_row], rtol=1e-6, atol=1e-6)


def test_rows_of_very_unequal_lengths_do_not_share_a_bucket() -> None:
    rows = [(row, keys, tuple(range(-(-keys // 16)))) for row, keys in enumerate((2000, 40, 50, 1900, 600))]
    buckets = bucket_rows(rows, 16, per_block=2, window=None)
    assert sorted(bucket.num_rows for bucket in buckets) == [1, 2, 2]
    assert all(bucket.rows is not None for bucket in buckets)
    # A window of 64 makes them equal again, and no row gathers more than the window's blocks.
    (bucket,) = bucket_rows(rows, 16, per_block=2, window=64)
    assert bucket.num_keys <= 64 + 16


def test_bfloat16_keeps_float32_accuracy_up_to_its_inputs() -> None:
    shape = Shape(kv_heads=2, group=3, dim=32, block_size=16, windows=(None,), softcap=None)
    layout = KvLayout(1, 2, 32, 16, "bfloat16")
    pool = KvPool(layout, memoryview(bytearray(8 * layout.block_bytes)), 8)
    q, k, v = (torch.randn(100, heads, 32, generator=torch.Generator().manual_seed(heads)).bfloat16() for heads in (6, 2, 2))
    step = TorchAttention(shape.config, pool).begin([SequenceRows(0, 100, 0, (6, 5, 4, 3, 2, 1, 0))])
    step.write(0, k, v)
    torch.testing.assert_close(step.attend(0, q).double(), naive(shape, q, k, v, 0, None), rtol=0.05, atol=0.03)


def test_the_pool_refuses_memory_that_does_not_fit() -> None:
    layout = KvLayout(1, 2, 8, 4, "float32")
    with pytest.raises(ValueError, match="need"):
        KvPool(layout, memoryview(bytearray(layout.block_bytes)), 2)
    with pytest.raises(ValueError, match="read-only"):
        KvPool(layout, memoryview(bytes(layout.block_bytes)), 1)
    with pytest.raises(ValueError, match="order"):
        KvPool(KvLayout(1, 2, 8, 4, "float32", order="packed"), memoryview(bytearray(layout.block_bytes)), 1)
