"""Reading config.json: old and new forms mean the same, and what is not supported is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.decoder_config import Norms, QkNorm
from engine.errors import ModelFilesError, UnsupportedModel
from engine.model_config import load_model_config, parse_model_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def test_a_plain_llama() -> None:
    config = parse_model_config(LLAMA)
    assert (config.num_layers, config.head_dim, config.num_kv_heads, config.max_model_len) == (4, 8, 2, 512)
    assert (config.eos_token_ids, config.default_dtype, config.tied_head) == ((2,), "bfloat16", False)
    layout = config.kv_layout(16, "bfloat16")
    assert layout.bytes_per_token == 4 * 2 * 2 * 8 * 2
    assert layout.order == "plain"


def test_old_and_new_rope_settings_mean_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling | {"type": "llama3"}}
    new = LLAMA | {"rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 5e5}}
    assert parse_model_config(old) == parse_model_config(new)
    assert parse_model_config(LLAMA | {"rope_theta": 5e5}) == parse_model_config(
        LLAMA | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    )


def test_gemma3_old_and_new_forms_mean_the_same() -> None:
    base = LLAMA | {"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 32, "head_dim": 16}
    old = base | {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    full, sliding = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, {"rope_type": "default", "rope_theta": 1e4}
    new = base | {"layer_types": types, "rope_parameters": {"full_attention": full, "sliding_attention": sliding}}
    config = parse_model_config(new)
    assert parse_model_config(old) == config
    assert [layer.window for layer in config.layers] == [32, 32, None] * 2
    assert {layer.rope.theta for layer in config.layers if layer.rope and layer.window} == {1e4}
    assert (config.norms, config.qk_norm, config.unit_offset_norm) == (Norms.SANDWICH, QkNorm.HEAD, True)


def test_window_rules_of_each_family() -> None:
    windows = lambda **fields: [layer.window for layer in parse_model_config(LLAMA | fields).layers]  # noqa: E731
    assert windows(model_type="mistral", sliding_window=9) == [9] * 4
    assert windows(model_type="mistral", sliding_window=None) == [None] * 4
    assert windows(model_type="qwen2", sliding_window=9) == [None] * 4
    assert windows(model_type="qwen2", sliding_window=9, use_sliding_window=True, max_window_layers=3) == [None] * 3 + [9]
    assert windows(model_type="gemma2", sliding_window=9) == [9, None, 9, None]
    assert windows(model_type="phi3", sliding_window=9) == [9] * 4
    assert windows(sliding_window=9) == [None] * 4


def test_a_null_soft_cap_switches_it_off_and_an_absent_one_is_the_family_s() -> None:
    gemma2 = LLAMA | {"model_type": "gemma2"}
    assert parse_model_config(gemma2).attention_softcap == 50.0
    assert parse_model_config(gemma2 | {"attn_logit_softcapping": None}).attention_softcap is None


def test_longrope_ends_at_the_length_that_its_short_factors_hold_for() -> None:
    rope = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = parse_model_config(
        LLAMA | {"model_type": "phi3", "rope_scaling": rope, "original_max_position_embeddings": 128}
    )
    assert config.max_model_len == 128


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "mamba"}, r"family 'mamba'.*supported: .*llama"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, r"rope type 'dynamic'.*yarn"),
        ({"hidden_act": "relu2"}, r"activation 'relu2'.*silu"),
        ({"num_local_experts": 8}, "mixture-of-experts"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "bidirectional"),
        (
            {
                "model_type": "qwen3",
                "layer_types": ["linear_attention"] * 4,
                "use_sliding_window": True,
                "sliding_window": 4,
            },
            "linear_attention",
        ),
        ({"torch_dtype": "float8_e4m3fn"}, "float8"),
        ({"partial_rotary_factor": 0.4}, "must be even"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse_model_config(LLAMA | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"hidden_size": "big"}, "'hidden_size' is 'big', not an integer"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0, not positive"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"tie_word_embeddings": "yes"}, "not true or false"),
        ({"eos_token_id": ["x"]}, "eos_token_id"),
        ({"rope_scaling": {"rope_type": "linear"}}, "no 'factor'"),
    ],
)
def test_a_broken_configuration_names_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFilesError, match=message):
        parse_model_config(LLAMA | fields)


def test_end_tokens_come_from_the_generation_configuration_when_it_has_any(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load_model_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert load_model_config(tmp_path).eos_token_ids == (7, 8)
    (tmp_path / "generation_config.json").write_text("{}")
    assert load_model_config(tmp_path).eos_token_ids == (2,)


def test_directories_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="missing"):
        load_model_config(tmp_path / "nowhere")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFilesError, match="convert it"):
        load_model_config(tmp_path / "model.gguf")
    with pytest.raises(ModelFilesError, match=r"config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelFilesError, match="JSON object"):
        load_model_config(tmp_path)


def test_configuration_and_fingerprint_need_no_torch_and_the_runner_no_transformers() -> None:
    for code in (
        "import engine.model_files, sys; assert 'torch' not in sys.modules",
        "import engine.model_runner, sys; assert 'transformers' not in sys.modules",
    ):
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
