"""Attention of a prompt's chunk: tiles of queries against blocks of keys, only where the causal mask lets them meet.

          keys 0 ………… start …………
queries   ┌─────────────┬──┐             Each tile's bmm stops at its last visible key. The mask is applied to
tile 0    │ no mask     │◣ │             the tile's own columns alone (◣), or to all with a sliding window.
tile 1    │             │  │◣ │          Longer rows of keys go through an online softmax
tile 2    └─────────────┴──┴──┘◣         (FlashAttention, arXiv 2205.14135) with float32 accumulators.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_TILE_QUERIES = 128
_KEYS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Tile:
    first_query: int  # within the chunk
    end_query: int
    first_key: int  # within the gathered keys
    end_key: int
    masked_from: int  # keys before it are seen by every query of the tile
    hidden: Tensor  # [query, end_key - masked_from] true where the key is not seen


@dataclass(frozen=True, slots=True)
class ChunkTiles:
    first_row: int
    num_tokens: int
    gather: Tensor  # [num_blocks] rows of pool.block_rows, of layer 0's keys
    num_keys: int
    tiles: tuple[Tile, ...]
    dtype: torch.dtype  # of the products


def tile_chunk(
    first_row: int,
    num_tokens: int,
    start: int,
    block_ids: tuple[int, ...],
    block_size: int,
    per_block: int,
    window: int | None,
    dtype: torch.dtype,
) -> ChunkTiles:
    """Geometry of one chunk, once per step and window."""
    first_block = 0 if window is None else max(0, start - window + 1) // block_size
    origin = first_block * block_size  # position of the first gathered key
    ids = block_ids[first_block : -(-(start + num_tokens) // block_size)]
    tiles = []
    for first_query in range(0, num_tokens, _TILE_QUERIES):
        end_query = min(first_query + _TILE_QUERIES, num_tokens)
        queries = torch.arange(start + first_query, start + end_query).view(-1, 1)
        lowest = 0 if window is None else max(0, start + first_query - window + 1)
        end_key = start + end_query
        masked_from = start + first_query if window is None else lowest
        keys = torch.arange(masked_from, end_key)
        hidden = keys > queries
        if window is not None:
            hidden = hidden | (keys <= queries - window)
        tiles.append(Tile(first_query, end_query, lowest - origin, end_key - origin, masked_from - origin, hidden))
    gather = torch.tensor(ids) * per_block
    return ChunkTiles(first_row, num_tokens, gather, len(ids) * block_size, tuple(tiles), dtype)


def attend_chunk(
    chunk: ChunkTiles,
    block_rows: Tensor,
    q: Tensor,
    output: Tensor,
    layer: int,
    num_kv_heads: int,
    scale: float,
    softcap: float | None,
) -> None:
    """Fill the chunk's rows of `output` [T, head, dim]."""
    num_heads, dim = q.shape[1], q.shape[2]
    group = num_heads // num_kv_heads
    rows = slice(chunk.first_row, chunk.first_row + chunk.num_tokens)
    # A KV head's query heads are rows of one matrix: [kv_head, group, query, dim].
    queries = (q[rows].to(chunk.dtype) * scale).view(chunk.num_tokens, num_kv_heads, group, dim).permute(1, 2, 0, 3)
    keys = _gather(block_rows, chunk.gather + layer * 2, chunk.num_keys, num_kv_heads, dim, chunk.dtype).transpose(1, 2)
    values = _gather(block_rows, chunk.gather + (layer * 2 + 1), chunk.num_keys, num_kv_heads, dim, chunk.dtype)
    target = output[rows].view(chunk.num_tokens, num_kv_heads, group, dim)
    for tile in chunk.tiles:
        query = queries[:, :, tile.first_query : tile.end_query].reshape(num_kv_heads, -1, dim)
        if tile.end_key - tile.first_key <= _KEYS_AT_ONCE:
            scores = _scores(query, keys, tile, tile.first_key, tile.end_key, group, softcap)
            weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
            result = torch.bmm(weights, values[:, tile.first_key : tile.end_key])
        else:
            result = _online(query, keys, values, tile, group, softcap).to(values.dtype)
        width = tile.end_query - tile.first_query
        target[tile.first_query : tile.end_query] = result.view(num_kv_heads, group, width, dim).permute(2, 0, 1, 3)


def _online(query: Tensor, keys: Tensor, values: Tensor, tile: Tile, group: int, softcap: float | None) -> Tensor:
    """Softmax over more keys than fit the cache: running maximum, sum and weighted values in float32."""
    heads, num_rows, dim = query.shape
    best = torch.full((heads, num_rows, 1), float("-inf"))
    total = torch.zeros(heads, num_rows, 1)
    summed = torch.zeros(heads, num_rows, dim)
    for first in range(tile.first_key, tile.end_key, _KEYS_AT_ONCE):
        end = min(first + _KEYS_AT_ONCE, tile.end_key)
        scores = _scores(query, keys, tile, first, end, group, softcap).float()
        new_best = torch.maximum(best, scores.amax(dim=-1, keepdim=True))
        # A row may see none of these keys yet (sliding window): its maximum is still -inf, and exp(-inf + inf) would be NaN.
        shift = new_best.masked_fill(new_best == float("-inf"), 0.0)
        weights = (scores - shift).exp_()
        decay = (best - shift).exp_()
        total = total * decay + weights.sum(dim=-1, keepdim=True)
        summed = summed * decay + torch.bmm(weights.to(values.dtype), values[:, first:end]).float()
        best = new_best
    return summed / total


def _scores(query: Tensor, keys: Tensor, tile: Tile, first: int, end: int, group: int, softcap: float | None) -> Tensor:
    """[kv_head, group × query, key] masked scores of keys `first` to `end`."""
    scores = torch.bmm(query, keys[:, :, first:end])
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    masked_first = max(first, tile.masked_from)
    if masked_first < end:
        hidden = tile.hidden[:, masked_first - tile.masked_from : end - tile.masked_from]
        by_group = scores.view(scores.shape[0], group, -1, end - first)
        by_group[..., masked_first - first :].masked_fill_(hidden, float("-inf"))
    return scores


def _gather(block_rows: Tensor, index: Tensor, num_keys: int, num_kv_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """[kv_head, key, dim]"""
    gathered = block_rows.index_select(0, index).view(num_keys, num_kv_heads, dim)
    return torch.empty(num_kv_heads, num_keys, dim, dtype=dtype).copy_(gathered.transpose(0, 1))
