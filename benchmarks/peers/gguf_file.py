"""A Llama model's safetensors as a GGUF file, so that llama.cpp runs the very same weights. No tokenizer goes in.

Names, metadata and the order of the rotated rows: llama.cpp's convert_hf_to_gguf.py (`LlamaModel`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

from engine.decoder_config import ModelConfig
from engine.model_config import load_model_config
from engine.model_files import weight_files

_MATRICES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_TYPES = {
    "float32": gguf.GGMLQuantizationType.F32,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "float16": gguf.GGMLQuantizationType.F16,
}


def why_not_gguf(config: ModelConfig) -> str | None:
    """What keeps a model from being written; None: nothing."""
    if config.family != "llama" or config.qkv_bias or config.mlp_bias:
        return f"only Llama models without biases are written as GGUF, not {config.family}"
    rope = config.layers[0].rope
    return None if rope is not None and rope.kind == "default" else "only Llama models with plain rotary embeddings"


def write_gguf(directory: Path, target: Path, dtype: str) -> None:
    """
    Args:
        dtype: of the matrices; norms are float32, as llama.cpp wants them.
    """
    config = load_model_config(directory)
    rope = config.layers[0].rope
    assert rope is not None
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_context_length(config.max_model_len)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(rope.rotary_dim)
    writer.add_rope_freq_base(rope.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    for name, values in _tensors(directory):
        short = name.removeprefix("model.")
        if short == "norm.weight":
            writer.add_tensor("output_norm.weight", values)
        elif short == "embed_tokens.weight":
            _add(writer, "token_embd.weight", values, dtype)
        elif short == "lm_head.weight":
            if not config.tied_head:
                _add(writer, "output.weight", values, dtype)
        else:
            _add_of_layer(writer, config, short, values, dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(directory: Path) -> list[tuple[str, Any]]:
    tensors = []
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            tensors += [(name, file.get_tensor(name).float().numpy()) for name in file.keys()]  # noqa: SIM118
    return tensors


def _add_of_layer(writer: Any, config: ModelConfig, name: str, values: Any, dtype: str) -> None:
    """`name`: layers.N.PART.weight"""
    _, number, part = name.removesuffix(".weight").split(".", 2)
    if part in _NORMS:
        writer.add_tensor(f"blk.{number}.{_NORMS[part]}.weight", values)
    elif part in _MATRICES:
        heads = {"self_attn.q_proj": config.num_heads, "self_attn.k_proj": config.num_kv_heads}.get(part)
        if heads is not None:  # llama.cpp turns neighbours where transformers turns halves
            values = values.reshape(heads, 2, values.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
        _add(writer, f"blk.{number}.{_MATRICES[part]}.weight", values, dtype)
    elif not part.endswith("inv_freq"):
        raise ValueError(f"{name} has no place in a Llama GGUF file")


def _add(writer: Any, name: str, values: Any, dtype: str) -> None:
    kind = _TYPES[dtype]
    writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
