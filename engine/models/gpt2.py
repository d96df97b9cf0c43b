"""GPT-2: learned positions, LayerNorm with biases, no rotation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.attention import AttentionStep
from engine.decoder_config import ModelConfig
from engine.models.layers import ACTIVATIONS, LayerNorm
from engine.models.linear import Linear


@dataclass(frozen=True, slots=True)
class Gpt2Layer:
    attention_norm: LayerNorm
    qkv: Linear
    attention_output: Linear
    mlp_norm: LayerNorm
    up: Linear
    down: Linear


class Gpt2:
    def __init__(
        self,
        config: ModelConfig,
        token_embedding: Tensor,
        position_embedding: Tensor,
        layers: list[Gpt2Layer],
        norm: LayerNorm,
        head: Linear,
    ) -> None:
        self._config = config
        self.embedding = token_embedding  # [vocab, hidden]
        self.position_embedding = position_embedding  # [max_model_len, hidden]
        self.layers = layers
        self.norm = norm
        self.head = head
        self._activation = ACTIVATIONS[config.activation]

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionStep) -> Tensor:
        """token_ids, positions: [T] -> hidden states [T, hidden]."""
        heads, dim, num_tokens = self._config.num_heads, self._config.head_dim, token_ids.shape[0]
        x = self.embedding.index_select(0, token_ids) + self.position_embedding.index_select(0, positions)
        for index, layer in enumerate(self.layers):
            q, k, v = layer.qkv(layer.attention_norm(x)).view(num_tokens, 3, heads, dim).unbind(dim=1)
            attention.write(index, k, v)
            x = x + layer.attention_output(attention.attend(index, q))
            x = x + layer.down(self._activation(layer.up(layer.mlp_norm(x))))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocab]"""
        return self.head(self.norm(hidden))
