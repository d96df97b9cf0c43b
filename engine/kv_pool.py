"""The KV pool as torch sees it: views over memory that the caller owns and that a transport may write into."""

from __future__ import annotations

import torch
from torch import Tensor

from wire.kv_layout import DTYPE_BYTES, KvLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KvPool:
    """`blocks` is [block, layer, k/v, token, head, dim], and the two row views share its memory:

        token_rows    [block × layer × k/v × token, head × dim]     one token's keys or values in one layer: for writing
        block_rows    [block × layer × k/v, token × head × dim]     one block's keys or values in one layer: for gathering

    Invariant: a slot that holds no token yet holds finite numbers, because `clear` is called for a block that a step begins
    and does not fill. So attention may read whole blocks and mask the scores alone: 0 × NaN never arises.
    """

    def __init__(self, layout: KvLayout, memory: memoryview, num_blocks: int) -> None:
        """
        Raises:
            ValueError: the memory is read-only or too small, or the layout's order is not plain.
        """
        if layout.order != "plain":
            raise ValueError(f"KV order {layout.order!r} is not this pool's; it keeps blocks in plain order")
        num_bytes = num_blocks * layout.block_bytes
        if memory.readonly:
            raise ValueError("kv_memory is read-only")
        if memory.nbytes < num_bytes:
            raise ValueError(f"kv_memory has {memory.nbytes} bytes; {num_blocks} blocks need {num_bytes}")
        dtype = TORCH_DTYPES[layout.dtype]
        count = num_bytes // DTYPE_BYTES[layout.dtype]
        flat = torch.frombuffer(memory, dtype=dtype, count=count)
        self.layout = layout
        self.num_blocks = num_blocks
        self.blocks: Tensor = flat.view(num_blocks, *layout.shape)
        row = layout.num_kv_heads * layout.head_dim
        self.token_rows: Tensor = flat.view(-1, row)
        self.block_rows: Tensor = flat.view(-1, layout.block_size * row)

    def clear(self, block_ids: list[int]) -> None:
        """Zero whole blocks, over all layers."""
        for block_id in block_ids:
            self.blocks[block_id].zero_()
