"""How one block's bytes are laid out, and the fingerprint by which two workers prove that they agree.

The pool is block-major: `[block, layer, k/v, token, head, dim]`, C order, so that one block over all layers is one
contiguous range of bytes and a hand-off is a few large copies.

    block 0                                             block 1
    ┌ layer 0 ──────────────┬ layer 1 ──────────────┬ … ┌ layer 0 …
    │ K [token, head, dim]  │ K [token, head, dim]  │   │
    │ V [token, head, dim]  │ V                     │   │
    └───────────────────────┴───────────────────────┴ … └
"""

from __future__ import annotations

import hashlib

import msgspec

PROTOCOL_VERSION = 2

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


class KvLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that decides what a block's bytes mean."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens per block
    dtype: str  # a key of DTYPE_BYTES
    order: str = "plain"  # the order inside a block; kernels that pack their own name it here

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """One block's shape: (layer, k/v, token, head, dim)."""
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        layers, kv, tokens, heads, dim = self.shape
        return layers * kv * tokens * heads * dim * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        return self.block_bytes // self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What must be equal before one worker may write KV into another.

    `model` is a digest of the configuration and the weights (see `engine.model_files`), `layout` one of the KV layout.
    """

    model: str
    layout: str

    def differences(self, other: Fingerprint) -> list[str]:
        """The names of the fields that differ, for a refusal that says why."""
        return [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]


def layout_digest(layout: KvLayout) -> str:
    return hashlib.blake2b(msgspec.json.encode(layout, order="sorted"), digest_size=16).hexdigest()
