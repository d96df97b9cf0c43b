"""What a cluster of fake runners must answer, computed without any cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from engine.fake_runner import reference_output
from wire.ids import RequestId
from wire.sequence import SamplingParams, SequenceSpec, StopRules

VOCAB_SIZE = 320
MAX_MODEL_LEN = 4096


def fake_model_dir(directory: Path) -> Path:
    """A configuration without weights: all that the fake runner reads."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_MODEL_LEN,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
        "eos_token_id": 2,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def reference(prompt: Sequence[int], max_tokens: int, sampling: SamplingParams | None = None) -> list[int]:
    spec = SequenceSpec(
        RequestId("reference"), tuple(prompt), sampling or SamplingParams(seed=0, temperature=0.0), StopRules(max_tokens)
    )
    return [token.token_id for token in reference_output(spec, VOCAB_SIZE, MAX_MODEL_LEN).tokens]
