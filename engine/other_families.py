"""Families that we have no layers for: what can be known of them from config.json alone. Torch-free.

Their layers are transformers' (`engine/models/transformers_model.py`), which says at the start, with the classes at hand,
whether our attention can stand in them. Here is what the KV pool and the cluster must know before that, and what is refused
already.
"""

from __future__ import annotations

from collections.abc import Collection

from engine.config_fields import ConfigFields
from engine.decoder_config import Activation, LayerConfig, ModelConfig
from engine.errors import ModelFilesError, UnsupportedModel

# They carry a state from token to token that is no KV of any token: blocks of a pool cannot hold, share or hand it over.
_RECURRENT = frozenset(
    {
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "mamba",
        "mamba2",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zamba",
        "zamba2",
    }
)
_ALIBI = frozenset({"bloom", "mpt"})  # positions are slopes added to the scores, which are not given to an attention
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_DTYPES = ("float32", "bfloat16", "float16")

# One thing, and the names that families have for it.
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")


def other_family(fields: ConfigFields, own: Collection[str]) -> ModelConfig:
    """A configuration with `own_layers` off.

    Args:
        own: families that have layers of their own, for the message.

    Raises:
        UnsupportedModel: the family, or how its layers attend, cannot be served.
        ModelFilesError: a field that the KV pool needs is missing.
    """
    family = fields.text("model_type")
    if family in _RECURRENT:
        raise UnsupportedModel(_refusal(family, "its layers keep a recurrent state, which no KV block holds", own))
    if family in _ALIBI:
        raise UnsupportedModel(_refusal(family, "its positions are slopes within attention (ALiBi)", own))
    if fields.flag("is_encoder_decoder", False):
        raise UnsupportedModel(_refusal(family, "it is an encoder with a decoder", own))
    if fields.has("attention_chunk_size"):
        raise UnsupportedModel(_refusal(family, "it attends within chunks (attention_chunk_size)", own))
    if fields.has("layer_types"):
        unknown = sorted(set(fields.texts("layer_types")) - _LAYER_TYPES)
        if unknown:
            raise UnsupportedModel(_refusal(family, f"it has layers of type {unknown[0]!r}", own))
    hidden, heads = fields.positive(_name(fields, _HIDDEN)), fields.positive(_name(fields, _HEADS))
    kv_heads = fields.positive(_name(fields, _KV_HEADS), heads)
    if heads % kv_heads:
        raise ModelFilesError(f"config.json: {heads} heads are not a multiple of {kv_heads} KV heads")
    head_dim = fields.positive("head_dim", hidden // heads)
    return ModelConfig(
        family=family,
        own_layers=False,
        vocab_size=fields.positive("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.positive(_name(fields, _INNER), 4 * hidden),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layers=(LayerConfig(rope=None),) * fields.positive(_name(fields, _LAYERS)),
        max_model_len=fields.positive(_name(fields, _CONTEXT)),
        eos_token_ids=fields.token_ids("eos_token_id"),
        default_dtype=_dtype(fields),
        attention_scale=head_dim**-0.5,
        norm_eps=0.0,
        activation=Activation.SILU,
        tied_head=False,
    )


def _refusal(family: str, why: str, own: Collection[str]) -> str:
    return (
        f"model family {family!r} is not supported: {why}; supported: {', '.join(sorted(own))}, "
        "and others that transformers can run with another's attention"
    )


def _name(fields: ConfigFields, names: tuple[str, ...]) -> str:
    """The one of `names` that this family uses; the first, if none, so that the error names that one."""
    return next((name for name in names if fields.has(name)), names[0])


def _dtype(fields: ConfigFields) -> str:
    name = fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch.")
    if name not in _DTYPES:
        raise UnsupportedModel(f"weights of dtype {name!r} are not supported; supported: {', '.join(_DTYPES)}")
    return name
