"""From the names in safetensors files to our modules: projections that read the same input become one matrix."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.decoder_config import ModelConfig, Norms, QkNorm
from engine.errors import ModelFilesError, UnsupportedModel
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.gpt2 import Gpt2, Gpt2Layer
from engine.models.layers import LayerNorm, RmsNorm
from engine.models.linear import Linear, LinearFactory

# Buffers that older checkpoints carry and nothing needs.
_IGNORED_ENDINGS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


def load_model(config: ModelConfig, files: Iterable[Path], dtype: torch.dtype, linear: LinearFactory) -> Decoder | Gpt2:
    """Build the model, tensor by tensor out of mapped files: no more than one fused matrix exists twice at a time.

    Raises:
        ModelFilesError: a file cannot be read, or a weight is missing or has the wrong shape.
        UnsupportedModel: there are weights that this family has no use for: the model is not what its config.json says.
    """
    with ExitStack() as stack:
        weights = _Weights(files, dtype, stack)
        model = _load_gpt2(config, weights, linear) if config.family == "gpt2" else _load_decoder(config, weights, linear)
        weights.check_all_used(tied_head=config.tied_head)
    return model


class _Weights:
    """Named tensors of several files, each taken once, in the dtype that the model runs in."""

    def __init__(self, files: Iterable[Path], dtype: torch.dtype, stack: ExitStack) -> None:
        self._dtype = dtype
        self._file_of: dict[str, Any] = {}
        for path in files:
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ModelFilesError(f"{path} cannot be read: {error}") from error
            self._file_of |= dict.fromkeys(file.keys(), file)
        self._unused = set(self._file_of)
        self.prefix = ""

    def find_prefix(self, known: str) -> None:
        """Checkpoints name the tensors of the body with or without `model.` (or `transformer.`)."""
        for name in self._file_of:
            if name == known or name.endswith("." + known):
                self.prefix = name.removesuffix(known)
                return
        raise ModelFilesError(f"the weights files hold no {known!r}")

    def body(self, name: str, *shape: int) -> Tensor:
        return self.top(self.prefix + name, *shape)

    def top(self, name: str, *shape: int) -> Tensor:
        file = self._file_of.get(name)
        if file is None:
            raise ModelFilesError(f"weight {name!r} is missing")
        tensor: Tensor = file.get_tensor(name)
        if tensor.shape != shape:
            raise ModelFilesError(f"weight {name!r} has shape {tuple(tensor.shape)}, not {shape}")
        if not tensor.is_floating_point():
            raise UnsupportedModel(f"weight {name!r} is {tensor.dtype}; quantised weights are not supported")
        self._unused.discard(name)
        return tensor.to(self._dtype)

    def check_all_used(self, *, tied_head: bool) -> None:
        left = {name for name in self._unused if not name.endswith(_IGNORED_ENDINGS)}
        if tied_head:
            left.discard("lm_head.weight")
        if left:
            examples = ", ".join(sorted(left)[:3])
            raise UnsupportedModel(f"{len(left)} weights have no place in this family, such as {examples}")


def _load_decoder(config: ModelConfig, weights: _Weights, linear: LinearFactory) -> Decoder:
    weights.find_prefix("embed_tokens.weight")
    embedding = weights.body("embed_tokens.weight", config.vocab_size, config.hidden_size)
    layers = [_decoder_layer(config, weights, linear, f"layers.{index}.") for index in range(config.num_layers)]
    norm = _norm(config, weights, "norm.weight")
    return Decoder(config, embedding, layers, norm, _head(config, weights, linear, embedding))


def _decoder_layer(config: ModelConfig, weights: _Weights, linear: LinearFactory, prefix: str) -> DecoderLayer:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    if config.family == "phi3":  # fused in the files already
        qkv = linear(weights.body(attention + "qkv_proj.weight", q + 2 * kv, hidden), None)
        gate_up = linear(weights.body(mlp + "gate_up_proj.weight", 2 * inner, hidden), None, (inner, inner))
    else:
        parts = [(attention + "q_proj", q), (attention + "k_proj", kv), (attention + "v_proj", kv)]
        qkv = _fused(weights, linear, parts, hidden, bias=config.qkv_bias)
        parts = [(mlp + "gate_proj", inner), (mlp + "up_proj", inner)]
        gate_up = _fused(weights, linear, parts, hidden, bias=config.mlp_bias, paired=True)
    has_pre, has_post = config.norms is not Norms.POST, config.norms is not Norms.PRE
    # Where a norm stands behind attention, "post_attention" means that; elsewhere it is the MLP's own norm.
    mlp_norm = "pre_feedforward_layernorm" if config.norms is Norms.SANDWICH else "post_attention_layernorm"
    q_size, k_size = (q, kv) if config.qk_norm is QkNorm.FULL else (config.head_dim, config.head_dim)
    has_qk_norm = config.qk_norm is not QkNorm.NONE
    return DecoderLayer(
        qkv=qkv,
        attention_output=_fused(weights, linear, [(attention + "o_proj", hidden)], q, bias=config.output_bias),
        gate_up=gate_up,
        down=_fused(weights, linear, [(mlp + "down_proj", hidden)], inner, bias=config.mlp_bias),
        attention_norm=_norm(config, weights, prefix + "input_layernorm.weight") if has_pre else None,
        attention_output_norm=_norm(config, weights, prefix + "post_attention_layernorm.weight") if has_post else None,
        mlp_norm=_norm(config, weights, prefix + mlp_norm + ".weight") if has_pre else None,
        mlp_output_norm=_norm(config, weights, prefix + "post_feedforward_layernorm.weight") if has_post else None,
        query_norm=_norm(config, weights, attention + "q_norm.weight", q_size) if has_qk_norm else None,
        key_norm=_norm(config, weights, attention + "k_norm.weight", k_size) if has_qk_norm else None,
    )


def _load_gpt2(config: ModelConfig, weights: _Weights, linear: LinearFactory) -> Gpt2:
    weights.find_prefix("wte.weight")
    hidden, inner = config.hidden_size, config.intermediate_size

    def conv1d(name: str, fan_in: int, fan_out: int) -> Linear:
        """GPT-2's Conv1D stores [in, out]."""
        weight = weights.body(name + ".weight", fan_in, fan_out).t().contiguous()
        return linear(weight, weights.body(name + ".bias", fan_out))

    def norm(name: str) -> LayerNorm:
        return LayerNorm(weights.body(name + ".weight", hidden), weights.body(name + ".bias", hidden), config.norm_eps)

    embedding = weights.body("wte.weight", config.vocab_size, hidden)
    positions = weights.body("wpe.weight", config.max_model_len, hidden)
    layers = [
        Gpt2Layer(
            attention_norm=norm(f"h.{index}.ln_1"),
            qkv=conv1d(f"h.{index}.attn.c_attn", hidden, 3 * hidden),
            attention_output=conv1d(f"h.{index}.attn.c_proj", hidden, hidden),
            mlp_norm=norm(f"h.{index}.ln_2"),
            up=conv1d(f"h.{index}.mlp.c_fc", hidden, inner),
            down=conv1d(f"h.{index}.mlp.c_proj", inner, hidden),
        )
        for index in range(config.num_layers)
    ]
    return Gpt2(config, embedding, positions, layers, norm("ln_f"), _head(config, weights, linear, embedding))


def _head(config: ModelConfig, weights: _Weights, linear: LinearFactory, embedding: Tensor) -> Linear:
    if config.tied_head:
        return linear(embedding, None)
    return linear(weights.top("lm_head.weight", config.vocab_size, config.hidden_size), None)


def _norm(config: ModelConfig, weights: _Weights, name: str, size: int | None = None) -> RmsNorm:
    weight = weights.body(name, size or config.hidden_size)
    return RmsNorm(weight, config.norm_eps, unit_offset=config.unit_offset_norm)


def _fused(
    weights: _Weights, linear: LinearFactory, parts: list[tuple[str, int]], fan_in: int, *, bias: bool, paired: bool = False
) -> Linear:
    """Matrices over one input, stacked: `parts` are (name, rows). Outputs of `paired` ones are read together."""
    matrices = [weights.body(name + ".weight", rows, fan_in) for name, rows in parts]
    biases = [weights.body(name + ".bias", rows) for name, rows in parts] if bias else []
    return linear(
        torch.cat(matrices) if len(matrices) > 1 else matrices[0],
        (torch.cat(biases) if len(biases) > 1 else biases[0]) if bias else None,
        tuple(rows for _, rows in parts) if paired else (),
    )
