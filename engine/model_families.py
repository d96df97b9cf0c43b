"""What each family's config.json means: one function for each, from its fields to a `ModelConfig`.

To add a family: write its function here, list it in FAMILIES, add its weight names to `engine/models/weights.py` if they
differ from Llama's, and give `tests/tiny_models.py` a tiny configuration: the tests then hold it against transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from engine.config_fields import ConfigFields
from engine.decoder_config import Activation, LayerConfig, ModelConfig, Norms, QkNorm
from engine.errors import ModelFilesError, UnsupportedModel
from engine.rope_config import longrope_limit, read_rope, read_rope_by_layer_type

ACTIVATIONS = MappingProxyType(
    {
        "silu": Activation.SILU,
        "swish": Activation.SILU,
        "gelu": Activation.GELU,
        "gelu_new": Activation.GELU_TANH,
        "gelu_fast": Activation.GELU_TANH,
        "gelu_pytorch_tanh": Activation.GELU_TANH,
    }
)


def _llama(fields: ConfigFields) -> ModelConfig:
    """Llama, SmolLM, and whatever else calls itself so."""
    bias = fields.flag("attention_bias", False)
    return replace(_decoder(fields), qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias", False))


def _mistral(fields: ConfigFields) -> ModelConfig:
    return _with_windows(_decoder(fields), fields, sliding=lambda layer: True)


def _qwen2(fields: ConfigFields) -> ModelConfig:
    return replace(_qwen_windows(_decoder(fields), fields), qkv_bias=True)


def _qwen3(fields: ConfigFields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    config = replace(_decoder(fields, default_head_dim=128), qk_norm=QkNorm.HEAD, qkv_bias=bias, output_bias=bias)
    return _qwen_windows(config, fields)


def _smollm3(fields: ConfigFields) -> ModelConfig:
    config = replace(
        _llama(fields),
        tied_head=fields.flag("tie_word_embeddings", True),
        layers=_decoder(fields, default_theta=2_000_000.0).layers,
    )
    interval = fields.positive("no_rope_layer_interval", 4)
    if fields.has("no_rope_layers"):
        rotated = [bool(value) for value in fields.numbers("no_rope_layers")]
    else:
        rotated = [(layer + 1) % interval != 0 for layer in range(config.num_layers)]
    if len(rotated) < config.num_layers:
        raise ModelFilesError(f"config.json: no_rope_layers has {len(rotated)} values for {config.num_layers} layers")
    if fields.flag("use_sliding_window", False):
        config = _with_windows(config, fields, sliding=lambda layer: not rotated[layer])
    pairs = zip(config.layers, rotated, strict=False)
    return replace(config, layers=tuple(layer if rotate else replace(layer, rope=None) for layer, rotate in pairs))


def _phi3(fields: ConfigFields) -> ModelConfig:
    return _with_windows(_decoder(fields), fields, sliding=lambda layer: True)


def _gemma(fields: ConfigFields) -> ModelConfig:
    config = _decoder(fields, default_head_dim=256, default_activation="gelu_pytorch_tanh")
    if fields.flag("use_bidirectional_attention", False):
        raise UnsupportedModel("bidirectional attention (use_bidirectional_attention) is not supported")
    bias = fields.flag("attention_bias", False)
    return replace(
        config,
        # The first configurations said "gelu" and meant the tanh approximation.
        activation=Activation.GELU_TANH if config.activation is Activation.GELU else config.activation,
        tied_head=fields.flag("tie_word_embeddings", True),
        unit_offset_norm=True,
        embedding_scale=config.hidden_size**0.5,
        qkv_bias=bias,
        output_bias=bias,
    )


def _gemma2(fields: ConfigFields) -> ModelConfig:
    config = replace(
        _gemma(fields),
        norms=Norms.SANDWICH,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=_optional_number(fields, "attn_logit_softcapping", 50.0),
        logit_softcap=_optional_number(fields, "final_logit_softcapping", 30.0),
    )
    return _with_windows(config, fields, sliding=lambda layer: layer % 2 == 0)


def _gemma3_text(fields: ConfigFields) -> ModelConfig:
    config = replace(
        _gemma(fields),
        norms=Norms.SANDWICH,
        qk_norm=QkNorm.HEAD,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=_optional_number(fields, "attn_logit_softcapping", None),
        logit_softcap=_optional_number(fields, "final_logit_softcapping", None),
    )
    pattern = fields.positive("sliding_window_pattern", 6)
    config = _with_windows(config, fields, sliding=lambda layer: (layer + 1) % pattern != 0)
    ropes = read_rope_by_layer_type(fields, head_dim=config.head_dim)
    kinds = ["full_attention" if layer.window is None else "sliding_attention" for layer in config.layers]
    return replace(
        config, layers=tuple(LayerConfig(ropes[k], layer.window) for k, layer in zip(kinds, config.layers, strict=True))
    )


def _granite(fields: ConfigFields) -> ModelConfig:
    return replace(
        _llama(fields),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        logit_divisor=fields.number("logits_scaling", 1.0),
    )


def _olmo2(fields: ConfigFields) -> ModelConfig:
    config = replace(_llama(fields), norms=Norms.POST, qk_norm=QkNorm.FULL, norm_eps=fields.number("rms_norm_eps", 1e-5))
    return replace(config, mlp_bias=False)


def _gpt2(fields: ConfigFields) -> ModelConfig:
    if fields.flag("scale_attn_by_inverse_layer_idx", False):
        raise UnsupportedModel("gpt2 with scale_attn_by_inverse_layer_idx is not supported")
    if fields.flag("add_cross_attention", False):
        raise UnsupportedModel("gpt2 with cross-attention (add_cross_attention) is not supported")
    hidden, heads = fields.positive("n_embd"), fields.positive("n_head")
    if hidden % heads:
        raise ModelFilesError(f"config.json: n_embd {hidden} is not a multiple of n_head {heads}")
    head_dim = hidden // heads
    return ModelConfig(
        family="gpt2",
        vocab_size=fields.positive("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.positive("n_inner", 4 * hidden),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        layers=(LayerConfig(rope=None),) * fields.positive("n_layer"),
        max_model_len=fields.positive("n_positions"),
        eos_token_ids=fields.token_ids("eos_token_id"),
        default_dtype=_dtype(fields),
        attention_scale=head_dim**-0.5 if fields.flag("scale_attn_weights", True) else 1.0,
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        activation=_activation(fields.text("activation_function", "gelu_new")),
        tied_head=fields.flag("tie_word_embeddings", True),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )


FAMILIES: Mapping[str, Callable[[ConfigFields], ModelConfig]] = MappingProxyType(
    {
        "llama": _llama,
        "mistral": _mistral,
        "qwen2": _qwen2,
        "qwen3": _qwen3,
        "smollm3": _smollm3,
        "gemma": _gemma,
        "gemma2": _gemma2,
        "gemma3_text": _gemma3_text,
        "phi3": _phi3,
        "granite": _granite,
        "olmo2": _olmo2,
        "gpt2": _gpt2,
    }
)


def _decoder(
    fields: ConfigFields,
    *,
    default_head_dim: int | None = None,
    default_activation: str = "silu",
    default_theta: float = 10_000.0,
) -> ModelConfig:
    """What all rotary families share."""
    hidden, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    kv_heads = fields.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelFilesError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = fields.positive("head_dim", default_head_dim or hidden // heads)
    # Gemma 3's nested form is read by its own function.
    nested = fields.nested("rope_parameters")
    by_layer_type = nested is not None and nested.has("full_attention")
    rope = None if by_layer_type else read_rope(fields, head_dim=head_dim, default_theta=default_theta)
    context = fields.positive("max_position_embeddings")
    limit = longrope_limit(fields, rope) if rope is not None else None
    return ModelConfig(
        family=fields.text("model_type"),
        vocab_size=fields.positive("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.positive("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layers=(LayerConfig(rope=rope),) * fields.positive("num_hidden_layers"),
        max_model_len=min(context, limit) if limit is not None else context,
        eos_token_ids=fields.token_ids("eos_token_id"),
        default_dtype=_dtype(fields),
        attention_scale=head_dim**-0.5,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=_activation(fields.text("hidden_activation", fields.text("hidden_act", default_activation))),
        tied_head=fields.flag("tie_word_embeddings", False),
    )


def _qwen_windows(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    if not fields.flag("use_sliding_window", False):
        return config
    first = fields.integer("max_window_layers", 28)
    return _with_windows(config, fields, sliding=lambda layer: layer >= first)


def _with_windows(config: ModelConfig, fields: ConfigFields, sliding: Callable[[int], bool]) -> ModelConfig:
    """Sliding windows for the layers that `layer_types` names, or else for those that the family's own rule names."""
    if not fields.has("sliding_window"):
        return config
    window = fields.positive("sliding_window")
    slides = [sliding(layer) for layer in range(config.num_layers)]
    if fields.has("layer_types") and config.family not in ("mistral", "phi3"):  # these two ignore the field
        types = fields.texts("layer_types")
        unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
        if unknown:
            raise UnsupportedModel(
                f"layer type {unknown[0]!r} is not supported; supported: full_attention, sliding_attention"
            )
        if len(types) != config.num_layers:
            raise ModelFilesError(f"config.json: layer_types has {len(types)} values for {config.num_layers} layers")
        slides = [kind == "sliding_attention" for kind in types]
    layers = (replace(layer, window=window) if s else layer for layer, s in zip(config.layers, slides, strict=True))
    return replace(config, layers=tuple(layers))


def _optional_number(fields: ConfigFields, name: str, default: float | None) -> float | None:
    """A number that a JSON null switches off, and that has a default where the field is absent."""
    if fields.has(name):
        return fields.number(name)
    return None if fields.is_null(name) else default


def _activation(name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _dtype(fields: ConfigFields) -> str:
    name = fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise UnsupportedModel(f"weights of dtype {name!r} are not supported; supported: float32, bfloat16, float16")
    return name
