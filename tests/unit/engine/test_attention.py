"""Paged attention against a naive reference: random shapes, windows, caps, chunkings and block tables."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attention_reference import Shape, check_any_batch, chunkings, naive, shapes
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import attention_chunk
from engine.attention import SequenceRows, TorchAttention
from engine.attention_decode import bucket_rows
from engine.kv_pool import KvPool
from wire.kv_layout import KvLayout


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    """Tiles so small that short sequences cross every border of them."""
    patch = pytest.MonkeyPatch()
    patch.setattr(attention_chunk, "_TILE_QUERIES", 8)
    patch.setattr(attention_chunk, "_KEYS_AT_ONCE", 16)
    yield
    patch.undo()


@settings(max_examples=120, deadline=None)
@given(shape=shapes, chunking=chunkings, seed=st.integers(0, 1000))
def test_any_batch_equals_the_naive_reference(shape: Shape, chunking: list[list[int]], seed: int) -> None:
    check_any_batch(TorchAttention, shape, chunking, seed)


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
