"""Attention of rows that compute one token each: all sequences of about one length in two batched products.

Keys and values are gathered block by block, padded to the longest row of a bucket. Products run in float32 also for a
bfloat16 pool: one query row for each head leaves oneDNN's bfloat16 product slower than the conversion (measured: 2 times at
batch 1, context 512; equal at batch 8).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_PADDING = 1.5  # longest over shortest row of one bucket
_SMALL = 8  # blocks: rows up to this much apart share a bucket whatever their ratio


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    rows: Tensor | None  # [B] rows of the step; None: all of them, in order
    gather: Tensor  # [B × num_blocks] rows of pool.block_rows, of layer 0's keys
    hidden: Tensor | None  # [B, 1, S] true where no key may be seen; None: all are
    num_rows: int
    num_keys: int  # S, padded


def bucket_rows(
    rows: list[tuple[int, int, tuple[int, ...]]], block_size: int, per_block: int, window: int | None
) -> list[DecodeBucket]:
    """
    Args:
        rows: (row in the step, number of keys including its own, block ids).
        per_block: rows of pool.block_rows in one block.
    """
    ranges = []
    for row, num_keys, block_ids in rows:
        first_key = 0 if window is None else max(0, num_keys - window)
        first = first_key // block_size
        ids = block_ids[first : -(-num_keys // block_size)]
        ranges.append((row, first_key - first * block_size, num_keys - first * block_size, ids))
    ranges.sort(key=lambda entry: len(entry[3]))
    buckets: list[list[tuple[int, int, int, tuple[int, ...]]]] = []
    for entry in ranges:
        if buckets:
            shortest = len(buckets[-1][0][3])
            if len(entry[3]) <= max(shortest * _MAX_PADDING, shortest + _SMALL):
                buckets[-1].append(entry)
                continue
        buckets.append([entry])
    total = len(rows)
    return [_make_bucket(bucket, block_size, per_block, total) for bucket in buckets]


def _make_bucket(
    entries: list[tuple[int, int, int, tuple[int, ...]]], block_size: int, per_block: int, total: int
) -> DecodeBucket:
    entries = sorted(entries)
    width = len(max(entries, key=lambda entry: len(entry[3]))[3])
    # A row's own first block pads it: it is in memory already, and its numbers are finite.
    padded = [ids + (ids[0],) * (width - len(ids)) for _, _, _, ids in entries]
    num_keys = width * block_size
    keys = torch.arange(num_keys)
    low = torch.tensor([entry[1] for entry in entries]).view(-1, 1, 1)
    high = torch.tensor([entry[2] for entry in entries]).view(-1, 1, 1)
    hidden = (keys >= high) | (keys < low)
    row_list = [entry[0] for entry in entries]
    in_order = len(entries) == total and row_list == list(range(total))
    return DecodeBucket(
        rows=None if in_order else torch.tensor(row_list),
        gather=torch.tensor(padded).view(-1) * per_block,
        hidden=hidden if bool(hidden.any()) else None,
        num_rows=len(entries),
        num_keys=num_keys,
    )


def attend_decode(
    bucket: DecodeBucket,
    block_rows: Tensor,
    q: Tensor,
    output: Tensor,
    layer: int,
    num_kv_heads: int,
    scale: float,
    softcap: float | None,
) -> None:
    """Fill the bucket's rows of `output` [T, head, dim]."""
    num_heads, dim = q.shape[1], q.shape[2]
    batch, num_keys, group = bucket.num_rows, bucket.num_keys, num_heads // num_kv_heads
    in_order = bucket.rows is None
    query = q[:batch] if bucket.rows is None else q.index_select(0, bucket.rows)
    query = (query.float() * scale).view(batch * num_kv_heads, group, dim)
    keys = _gather(block_rows, bucket.gather + layer * 2, batch, num_keys, num_kv_heads, dim)
    scores = torch.bmm(query, keys.transpose(1, 2)).view(batch, num_heads, num_keys)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if bucket.hidden is not None:
        scores.masked_fill_(bucket.hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1).view(batch * num_kv_heads, group, num_keys)
    values = _gather(block_rows, bucket.gather + (layer * 2 + 1), batch, num_keys, num_kv_heads, dim)
    result = torch.bmm(weights, values).view(batch, num_heads, dim).to(output.dtype)
    if in_order:
        output[:batch] = result
    elif bucket.rows is not None:
        output.index_copy_(0, bucket.rows, result)


def _gather(block_rows: Tensor, index: Tensor, batch: int, num_keys: int, num_kv_heads: int, dim: int) -> Tensor:
    """[batch × kv_head, key, dim] in float32."""
    gathered = block_rows.index_select(0, index).view(batch, num_keys, num_kv_heads, dim)
    ordered = torch.empty(batch, num_kv_heads, num_keys, dim, dtype=torch.float32)
    ordered.copy_(gathered.transpose(1, 2))
    return ordered.view(batch * num_kv_heads, num_keys, dim)
