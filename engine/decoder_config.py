"""A decoder, described completely: what a layer does follows from these frozen values, none of it from a family's name.

                tokens ─▶ embedding (× embedding_scale)
norms=PRE         x + attention(norm(x));            x + mlp(norm(x))              Llama and most others
norms=SANDWICH    x + norm(attention(norm(x)));      x + norm(mlp(norm(x)))        Gemma 2 and 3
norms=POST        x + norm(attention(x));            x + norm(mlp(x))              OLMo 2
                norm ─▶ head ─▶ logits (÷ logit_divisor, soft-capped)
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from wire.kv_layout import KvLayout


class Norms(enum.Enum):
    """Where a block's norms stand."""

    PRE = "pre"
    SANDWICH = "sandwich"
    POST = "post"


class QkNorm(enum.Enum):
    """RMSNorm of queries and keys before the rotation."""

    NONE = "none"
    HEAD = "head"  # over each head
    FULL = "full"  # over all heads at once


class Activation(enum.Enum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of one kind of layer; the fields behind `rotary_dim` matter only to the kinds that name them."""

    kind: str  # default | linear | llama3 | yarn | longrope
    theta: float
    rotary_dim: int  # leading part of each head that is rotated
    factor: float = 1.0  # linear, llama3, yarn
    original_max_position: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    dim_factors: tuple[float, ...] = ()  # longrope: one for each frequency
    attention_factor: float = 1.0  # yarn, longrope: multiplies cosine and sine


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ between two layers."""

    rope: RopeConfig | None  # None: no rotation (learned positions, or a NoPE layer)
    window: int | None = None  # tokens that a query sees, itself included; None: all before it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model, as the runner builds it.

    With `own_layers` off its layers are transformers' own: then the sizes of heads, layers, vocabulary and context say what
    the KV pool and the cluster need, and what lies between them (norms, activation, rotation, biases) says nothing.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    max_model_len: int  # positions
    eos_token_ids: tuple[int, ...]
    default_dtype: str  # of the weights' files: a key of wire.kv_layout.DTYPE_BYTES
    attention_scale: float
    norm_eps: float
    activation: Activation
    tied_head: bool
    own_layers: bool = True
    norms: Norms = Norms.PRE
    qk_norm: QkNorm = QkNorm.NONE
    unit_offset_norm: bool = False  # Gemma's norm multiplies by 1 + weight
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def kv_layout(self, block_size: int, dtype: str) -> KvLayout:
        """The layout of this model's KV pool with blocks of `block_size` tokens."""
        return KvLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=dtype,
        )
