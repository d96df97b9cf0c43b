"""Tiny random-weight models of every supported family, made on the fly, so that tests need no download.

make_tiny_model("llama", directory)   ->  config.json, generation_config.json, model.safetensors,
                                          tokenizer.json, tokenizer_config.json (with a chat template)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2  # <|im_end|>
WINDOW = 12

_COMMON: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # large enough that greedy choices differ clearly
}
_PLAIN: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [2.0, 3.0, 4.0],
    "partial_rotary_factor": 0.75,
}
_GEMMA = _COMMON | {"head_dim": 16, "tie_word_embeddings": True}

# name -> (transformers' configuration class, its arguments); a variant's name begins with its family's.
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _COMMON),
    "llama-bias-llama3rope": (
        "LlamaConfig",
        _COMMON | {"attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3_ROPE},
    ),
    "smollm": ("LlamaConfig", _COMMON | {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "mistral": ("MistralConfig", _COMMON | {"sliding_window": WINDOW, "head_dim": 16}),
    "qwen2": ("Qwen2Config", _COMMON | {"rope_parameters": _YARN_ROPE}),
    "qwen2-windows": (
        "Qwen2Config",
        _COMMON | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", _COMMON | {"head_dim": 16, "rope_parameters": _LINEAR_ROPE}),
    "smollm3": ("SmolLM3Config", _COMMON | {"no_rope_layer_interval": 2}),
    "gemma": ("GemmaConfig", _GEMMA),
    "gemma2": (
        "Gemma2Config",
        _GEMMA | {"sliding_window": WINDOW, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0},
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        _GEMMA
        | {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        },
    ),
    "phi3": ("Phi3Config", _COMMON | {"sliding_window": 40}),
    "phi3-longrope": (
        "Phi3Config",
        _COMMON | {"original_max_position_embeddings": 128, "rope_parameters": _LONG_ROPE},
    ),
    "gpt2": ("GPT2Config", {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256, "initializer_range": 0.2}),
    "granite": (
        "GraniteConfig",
        _COMMON
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ),
    "olmo2": ("Olmo2Config", _COMMON),
    # Families whose layers are transformers' own.
    "opt": ("OPTConfig", _PLAIN | {"ffn_dim": 80, "word_embed_proj_dim": 48, "init_std": 0.2}),
    "gpt_neox": ("GPTNeoXConfig", _PLAIN | {"intermediate_size": 80, "rotary_pct": 0.5}),
    "starcoder2": ("Starcoder2Config", _COMMON | {"sliding_window": WINDOW}),
    "phi": ("PhiConfig", _COMMON | {"partial_rotary_factor": 0.5}),
    "mixtral": ("MixtralConfig", _COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_bigcode": (
        "GPTBigCodeConfig",
        {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256, "initializer_range": 0.2},
    ),
    # Families that cannot be served.
    "bloom": ("BloomConfig", {"hidden_size": 48, "n_layer": 2, "n_head": 6}),
    "stablelm": ("StableLmConfig", _COMMON),
    "gpt_oss": ("GptOssConfig", _COMMON | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}),
}
_OTHERS = ("opt", "gpt_neox", "starcoder2", "phi", "mixtral", "gpt_bigcode")
_REFUSED = ("bloom", "stablelm", "gpt_oss")

FAMILIES: tuple[str, ...] = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "smollm3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt2",
)
FAMILIES += ("granite", "olmo2")
VARIANTS: tuple[str, ...] = tuple(name for name in _CONFIGS if name not in (*_OTHERS, *_REFUSED))
"""Families and further variants of some (biases, rope types, windows)."""
OTHER_FAMILIES: tuple[str, ...] = _OTHERS
"""Served through transformers' own classes."""
REFUSED_FAMILIES: tuple[str, ...] = _REFUSED


def make_tiny_model(family: str, directory: Path, vocab_size: int = 320, seed: int = 0) -> Path:
    """Write a random model and its tokenizer into `directory`, and return it.

    Args:
        family: one of VARIANTS, OTHER_FAMILIES, REFUSED_FAMILIES.
        vocab_size: at least 259: 256 bytes and the special tokens. Ids past those decode to placeholder words.
    """
    class_name, arguments = _CONFIGS[family]
    config = getattr(transformers, class_name)(
        vocab_size=vocab_size, bos_token_id=1, eos_token_id=EOS_TOKEN_ID, pad_token_id=0, **json.loads(json.dumps(arguments))
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if family.startswith("gemma") and name.endswith("embed_tokens.weight"):
                parameter.data.mul_(0.2)  # else the scaled, tied embedding outweighs the layers and repeats its input
            if parameter.dim() == 1:  # norms and biases start at one value: make them say something
                shift = 0.3 * torch.randn(parameter.shape)
                parameter.data.add_(shift if "norm" in name or "ln_" in name else 0.1 * shift)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    transformers.GenerationConfig(eos_token_id=EOS_TOKEN_ID, bos_token_id=1).save_pretrained(directory)
    write_tiny_tokenizer(directory, vocab_size)
    return directory


def write_tiny_tokenizer(directory: Path, vocab_size: int) -> None:
    """A byte-level BPE without merges: any text round-trips, one token for each byte; other ids are words of their own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIAL_TOKENS, *alphabet]
    if vocab_size < len(words):
        raise ValueError(f"vocab_size {vocab_size} is below {len(words)}")
    words += [f"<filler{index}>" for index in range(vocab_size - len(words))]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 256,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
