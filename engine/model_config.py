"""Reads a model directory's config.json: its family, and everything that decides what the model computes. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.config_fields import ConfigFields
from engine.decoder_config import LayerConfig, ModelConfig, RopeConfig
from engine.errors import ModelFilesError, UnsupportedModel
from engine.model_families import FAMILIES
from engine.other_families import other_family

__all__ = ["LayerConfig", "ModelConfig", "RopeConfig", "load_model_config", "parse_model_config", "read_json"]

_MOE_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts")


def load_model_config(path: Path) -> ModelConfig:
    """The model in directory `path`; end tokens are generation_config.json's where it names any.

    Raises:
        ModelFilesError: no directory, no config.json, or a field that is missing or of the wrong type.
        UnsupportedModel: the family or a feature of this model is not supported; the message names it.
    """
    if not path.is_dir():
        kind = "a file; convert it first" if path.is_file() else "missing"
        raise ModelFilesError(f"model directory {path} is {kind}")
    config = parse_model_config(read_json(path / "config.json"))
    generation = path / "generation_config.json"
    if generation.is_file():
        eos_token_ids = ConfigFields(read_json(generation), "generation_config.json").token_ids("eos_token_id")
        config = replace(config, eos_token_ids=eos_token_ids or config.eos_token_ids)
    return config


def parse_model_config(values: Mapping[str, Any]) -> ModelConfig:
    """The same for a config.json that has been read already."""
    fields = ConfigFields(values)
    parse = FAMILIES.get(fields.text("model_type"))
    quantization = fields.nested("quantization_config")
    if quantization is not None:
        method = quantization.text("quant_method", "unknown")
        raise UnsupportedModel(f"quantised weights ({method}) are not supported; convert the model to bfloat16 first")
    if parse is None:
        return other_family(fields, FAMILIES)
    for name in _MOE_FIELDS:
        if fields.has(name) and fields.integer(name) > 1:
            raise UnsupportedModel(f"mixture-of-experts models ({name}) are not supported")
    return parse(fields)


def read_json(path: Path) -> dict[str, Any]:
    """
    Raises:
        ModelFilesError: the file is missing, or does not hold a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path} does not hold a JSON object")
    return value
