"""A model directory for the fake runner: a configuration and a tokenizer, no weights.

Its tokenizer keeps words of four letters in one piece, as a real one keeps common words, so that prompts of a known length
can be made and every token of an answer shows as text.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONTEXT = 32_768
END_TOKEN = "<|end|>"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
NUM_WORDS = 1021


def write_fake_model(directory: Path) -> Path:
    """The directory, which is made if it is not there."""
    directory.mkdir(parents=True, exist_ok=True)
    consonants, vowels = "bdfgklmnprstvz", "aeiou"
    words = ("".join(parts) for parts in itertools.product(consonants, vowels, consonants, vowels))
    tokens = [END_TOKEN, "Ġ", *LETTERS, *(f"Ġ{word}" for word in itertools.islice(words, NUM_WORDS))]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_TOKEN])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_TOKEN, "model_max_length": CONTEXT}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(tokens),
        "max_position_embeddings": CONTEXT,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
        "eos_token_id": 0,
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
