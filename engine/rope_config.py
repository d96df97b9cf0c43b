"""Reads rotary settings: transformers 5's `rope_parameters`, and the older `rope_theta` with `rope_scaling`."""

from __future__ import annotations

import math

from engine.config_fields import ConfigFields
from engine.decoder_config import RopeConfig
from engine.errors import ModelFilesError, UnsupportedModel

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")


def read_rope(fields: ConfigFields, *, head_dim: int, default_theta: float = 10_000.0) -> RopeConfig:
    """The rotary embedding that all layers share.

    Raises:
        UnsupportedModel: a scaling type that is not in ROPE_KINDS.
    """
    return _parse(fields, fields.nested("rope_parameters") or fields.nested("rope_scaling"), head_dim, default_theta)


def read_rope_by_layer_type(fields: ConfigFields, *, head_dim: int) -> dict[str, RopeConfig]:
    """Gemma 3: sliding layers turn with a base of their own and are never scaled."""
    nested = fields.nested("rope_parameters")
    if nested is not None and (nested.has("full_attention") or nested.has("sliding_attention")):
        full, sliding = nested.nested("full_attention"), nested.nested("sliding_attention")
    else:
        full, sliding = fields.nested("rope_scaling") or nested, None
    local_theta = fields.number("rope_local_base_freq", 10_000.0)
    return {
        "full_attention": _parse(fields, full, head_dim, 1_000_000.0),
        "sliding_attention": _parse(ConfigFields({}), sliding, head_dim, local_theta),
    }


def longrope_limit(fields: ConfigFields, rope: RopeConfig) -> int | None:
    """Positions for which LongRoPE's short factors hold.

    Past them transformers switches all positions to the long factors and computes the whole cache anew; with paged blocks
    that are shared and handed over, one set of factors must hold for all, so the context ends there.
    """
    return rope.original_max_position if rope.kind == "longrope" else None


def _parse(fields: ConfigFields, scaling: ConfigFields | None, head_dim: int, default_theta: float) -> RopeConfig:
    scaling = scaling or ConfigFields({}, "rope_parameters")
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind == "su" or (kind == "yarn" and scaling.has("short_factor")):  # Phi-3's first names for LongRoPE
        kind = "longrope"
    if kind not in ROPE_KINDS:
        raise UnsupportedModel(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    theta = scaling.number("rope_theta", fields.number("rope_theta", default_theta))
    partial = scaling.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    dim = int(head_dim * partial)
    if dim <= 0 or dim % 2:
        raise UnsupportedModel(
            f"a rotary dimension of {dim} (head_dim {head_dim} × {partial}) is not supported: it must be even"
        )
    if kind == "default":
        return RopeConfig(kind, theta, dim)
    if kind == "linear":
        return RopeConfig(kind, theta, dim, factor=scaling.number("factor"))
    context = fields.positive("max_position_embeddings")
    nested_original = scaling.positive("original_max_position_embeddings", context)
    original = fields.positive("original_max_position_embeddings", nested_original)
    if kind == "llama3":
        return RopeConfig(
            kind,
            theta,
            dim,
            factor=scaling.number("factor"),
            original_max_position=original,
            low_freq_factor=scaling.number("low_freq_factor"),
            high_freq_factor=scaling.number("high_freq_factor"),
        )
    factor = scaling.number("factor", context / original)
    if kind == "yarn":
        return RopeConfig(
            kind,
            theta,
            dim,
            factor=factor,
            original_max_position=original,
            beta_fast=scaling.number("beta_fast", 32.0) or 32.0,
            beta_slow=scaling.number("beta_slow", 1.0) or 1.0,
            truncate=scaling.flag("truncate", True),
            attention_factor=_yarn_attention_factor(scaling, factor),
        )
    short_factors = scaling.numbers("short_factor")
    if len(short_factors) != dim // 2:
        raise ModelFilesError(f"config.json: short_factor has {len(short_factors)} values for a rotary dimension of {dim}")
    default_factor = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeConfig(
        kind,
        theta,
        dim,
        original_max_position=original,
        dim_factors=short_factors,
        attention_factor=scaling.number("attention_factor", default_factor),
    )


def _yarn_attention_factor(scaling: ConfigFields, factor: float) -> float:
    """YaRN (arXiv 2309.00071), with DeepSeek's `mscale` fields as transformers reads them."""

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if scaling.has("attention_factor"):
        return scaling.number("attention_factor")
    mscale, mscale_all_dim = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)
