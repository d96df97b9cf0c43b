"""One decoder for all rotary families: what differs between them stands in `ModelConfig`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention import AttentionStep
from engine.decoder_config import ModelConfig, QkNorm, RopeConfig
from engine.models.layers import ACTIVATIONS, RmsNorm
from engine.models.linear import Linear
from engine.models.rotary import Rotation, inverse_frequencies


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights of one layer. A norm that the family does not have is None."""

    qkv: Linear  # [T, hidden] -> [T, (heads + 2 × kv_heads) × dim]
    attention_output: Linear
    gate_up: Linear  # [T, hidden] -> [T, 2 × intermediate]
    down: Linear
    attention_norm: RmsNorm | None  # before attention
    attention_output_norm: RmsNorm | None  # behind it, before the residual is added
    mlp_norm: RmsNorm | None
    mlp_output_norm: RmsNorm | None
    query_norm: RmsNorm | None
    key_norm: RmsNorm | None


class Decoder:
    def __init__(
        self, config: ModelConfig, embedding: Tensor, layers: list[DecoderLayer], norm: RmsNorm, head: Linear
    ) -> None:
        self._config = config
        self.embedding = embedding  # [vocab, hidden]
        self.layers = layers
        self.norm = norm
        self.head = head
        self._activation: Callable[[Tensor], Tensor] = ACTIVATIONS[config.activation]
        self._frequencies = {
            layer.rope: inverse_frequencies(layer.rope) for layer in config.layers if layer.rope is not None
        }
        # transformers rounds the scale to the weights' dtype, and trained Gemma checkpoints expect that.
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=embedding.dtype)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionStep) -> Tensor:
        """token_ids, positions: [T] of all sequences of the step, end to end -> hidden states [T, hidden]."""
        config, residual_scale = self._config, self._config.residual_scale
        x = self.embedding.index_select(0, token_ids)
        if config.embedding_scale != 1.0:
            x = x * self.embedding_scale
        rotations: dict[RopeConfig | None, Rotation | None] = {None: None}
        for rope, frequencies in self._frequencies.items():
            rotations[rope] = Rotation(frequencies, rope.attention_factor, positions, x.dtype)
        for index, (layer, settings) in enumerate(zip(self.layers, config.layers, strict=True)):
            y = x if layer.attention_norm is None else layer.attention_norm(x)
            y = self._attend(layer, index, y, rotations[settings.rope], attention)
            if layer.attention_output_norm is not None:
                y = layer.attention_output_norm(y)
            x = x + (y if residual_scale == 1.0 else y * residual_scale)
            y = x if layer.mlp_norm is None else layer.mlp_norm(x)
            gate, up = layer.gate_up(y).chunk(2, dim=-1)
            y = layer.down(self._activation(gate) * up)
            if layer.mlp_output_norm is not None:
                y = layer.mlp_output_norm(y)
            x = x + (y if residual_scale == 1.0 else y * residual_scale)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocab]"""
        logits = self.head(self.norm(hidden))
        if self._config.logit_divisor != 1.0:
            logits = logits / self._config.logit_divisor
        cap = self._config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _attend(
        self, layer: DecoderLayer, index: int, x: Tensor, rotation: Rotation | None, attention: AttentionStep
    ) -> Tensor:
        config = self._config
        num_tokens, dim, heads, kv_heads = x.shape[0], config.head_dim, config.num_heads, config.num_kv_heads
        qkv = layer.qkv(x)
        split = heads + kv_heads
        v = qkv[:, split * dim :].view(num_tokens, kv_heads, dim)
        if layer.query_norm is None or layer.key_norm is None:
            qk = qkv[:, : split * dim].view(num_tokens, split, dim)  # queries and keys turn in one go
        elif config.qk_norm is QkNorm.FULL:
            q, k = layer.query_norm(qkv[:, : heads * dim]), layer.key_norm(qkv[:, heads * dim : split * dim])
            qk = torch.cat((q, k), dim=-1).view(num_tokens, split, dim)
        else:
            by_head = qkv.view(num_tokens, split + kv_heads, dim)
            qk = torch.cat((layer.query_norm(by_head[:, :heads]), layer.key_norm(by_head[:, heads:split])), dim=1)
        if rotation is not None:
            qk = rotation.apply(qk)
        attention.write(index, qk[:, heads:], v)
        return layer.attention_output(attention.attend(index, qk[:, :heads]))
