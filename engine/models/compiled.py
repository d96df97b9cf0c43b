"""A model that the compiled kernels run: its weights, described once in C structs, and one call for each step."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.attention import blocks_begun
from engine.decoder_config import Activation, ModelConfig, QkNorm, RopeConfig
from engine.kernels import structs
from engine.kernels.library import Kernels
from engine.kv_pool import KvPool
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.gpt2 import Gpt2, Gpt2Layer
from engine.models.layers import LayerNorm, RmsNorm
from engine.models.linear import Linear
from engine.models.packed_linear import PackedLinear
from engine.models.rotary import inverse_frequencies
from engine.step_model import StepLogits, StepRows

_ACTIVATIONS = {Activation.SILU: 0, Activation.GELU: 1, Activation.GELU_TANH: 2}
_QK_NORMS = {QkNorm.NONE: 0, QkNorm.HEAD: 1, QkNorm.FULL: 2}
_RMS_NORM, _LAYER_NORM = 1, 2
_MAX_GROUP = 128  # query heads of one KV head: kTileLanes in csrc/attention.h


def why_not_compiled(config: ModelConfig, dtype: str) -> str | None:
    """What keeps the compiled kernels from running this model; None: nothing."""
    if dtype not in structs.DTYPES:
        return f"they have no {dtype}"
    if config.num_heads // config.num_kv_heads > _MAX_GROUP:
        return f"{config.num_heads // config.num_kv_heads} query heads share a KV head"
    return None


class CompiledModel:
    """Not thread-safe. Reuses its buffers: a step allocates nothing once the largest one has been seen."""

    def __init__(self, config: ModelConfig, model: Decoder | Gpt2, pool: KvPool, kernels: Kernels) -> None:
        """`model` was loaded with `PackedLinears` of the same kernels; its tensors are kept, its operators never run."""
        self._kernels = kernels
        self._kv_pool = pool
        self._vocab = config.vocab_size
        self._kept: list[Any] = [model]  # whatever the structs point at
        layout = pool.layout
        self._pool = structs.Pool(
            pool.blocks.data_ptr(), layout.num_layers, layout.block_size, layout.num_kv_heads, layout.head_dim
        )
        self._model = self._describe(config, model, layout.dtype)
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._logits = torch.empty(0, self._vocab)
        self._best = array("i")

    def run(self, rows: StepRows) -> StepLogits | None:
        self._kv_pool.clear(blocks_begun(rows.sequences, self._kv_pool.layout.block_size))
        tokens, positions, wanted = array("i", rows.token_ids), array("i", rows.positions), array("i", rows.logit_rows)
        sequences, block_ids = array("i"), array("i")
        for sequence in rows.sequences:
            sequences.extend((sequence.first_row, sequence.num_tokens, sequence.start, len(block_ids)))
            block_ids.extend(sequence.block_ids)
        num_wanted = len(wanted)
        if num_wanted > self._logits.shape[0]:
            self._logits = torch.empty(num_wanted, self._vocab)
            self._best = array("i", [0] * num_wanted)
        step = structs.Step(
            *(each.buffer_info()[0] for each in (tokens, positions, sequences, block_ids, wanted)),
            self._logits.data_ptr(),
            self._best.buffer_info()[0],
            None,
            len(tokens),
            len(rows.sequences),
            num_wanted,
            torch.get_num_threads(),
        )
        needed = self._kernels.workspace_bytes(self._model, step)
        if needed > self._workspace.numel():
            self._workspace = torch.empty(needed + needed // 4, dtype=torch.uint8)
        step.workspace = self._workspace.data_ptr()
        self._kernels.forward(self._model, self._pool, step)
        if not num_wanted:
            return None
        best: list[int | None] = [each if each >= 0 else None for each in self._best[:num_wanted]]
        return StepLogits(self._logits[:num_wanted], best)

    # -- the structs --------------------------------------------------------------------------------------------------

    def _describe(self, config: ModelConfig, model: Decoder | Gpt2, dtype: str) -> structs.Model:
        ropes: dict[RopeConfig, int] = {}
        for settings in config.layers:
            if settings.rope is not None:
                ropes.setdefault(settings.rope, len(ropes))
        layers = (structs.Layer * config.num_layers)()
        sources: Sequence[DecoderLayer | Gpt2Layer] = model.layers
        for target, layer, settings in zip(layers, sources, config.layers, strict=True):
            for name in ("qkv", "attention_output", "down"):
                setattr(target, name, self._linear(getattr(layer, name)))
            if isinstance(layer, DecoderLayer):
                target.gate, target.up = self._parts(layer.gate_up, 2)
            else:
                target.up = self._linear(layer.up)
            for name in ("attention_norm", "attention_output_norm", "mlp_norm", "mlp_output_norm", "query_norm", "key_norm"):
                setattr(target, name, self._norm(getattr(layer, name, None)))
            target.rope = -1 if settings.rope is None else ropes[settings.rope]
            target.window = settings.window or 0
        turns = (structs.Rope * max(1, len(ropes)))()
        for rope, index in ropes.items():
            turns[index] = structs.Rope(
                self._pointer(inverse_frequencies(rope).contiguous()), rope.rotary_dim, rope.attention_factor
            )
        self._kept += [layers, turns]
        positions = model.position_embedding if isinstance(model, Gpt2) else None
        return structs.Model(
            ctypes.addressof(layers),
            ctypes.addressof(turns),
            self._pointer(model.embedding),
            None if positions is None else self._pointer(positions),
            self._linear(model.head),
            self._norm(model.norm),
            structs.DTYPES[dtype],
            config.num_layers,
            len(ropes),
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.vocab_size,
            _ACTIVATIONS[config.activation],
            _QK_NORMS[config.qk_norm],
            config.attention_scale,
            config.attention_softcap or 0.0,
            config.logit_softcap or 0.0,
            float(model.embedding_scale) if isinstance(model, Decoder) else 1.0,
            config.residual_scale,
            config.logit_divisor,
        )

    def _linear(self, linear: Linear) -> structs.Linear:
        (part,) = self._parts(linear, 1)
        return part

    def _parts(self, linear: Linear, count: int) -> list[structs.Linear]:
        if not isinstance(linear, PackedLinear) or len(linear.parts) != count:
            raise TypeError(f"{linear!r} is no packed linear layer of {count} parts")
        return linear.parts

    def _norm(self, norm: RmsNorm | LayerNorm | None) -> structs.Norm:
        if norm is None:
            return structs.Norm()
        bias = norm.bias if isinstance(norm, LayerNorm) else None
        return structs.Norm(
            self._pointer(norm.weight.float().contiguous()),
            None if bias is None else self._pointer(bias.float().contiguous()),
            norm.eps,
            _RMS_NORM if bias is None else _LAYER_NORM,
        )

    def _pointer(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()
