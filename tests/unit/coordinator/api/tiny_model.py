"""A model directory with a byte-level BPE tokenizer that was trained here; no emoji is one token of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from coordinator.text_model import TextModel

SENTENCES = ["the quick brown fox jumps over the lazy dog", "a a a a a stop STOP END", "prefill and decode are two phases"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EOS = 2
MAX_MODEL_LEN = 256


def write_model(
    directory: Path,
    template: str | None = TEMPLATE,
    eos_ids: Any = EOS,
    max_model_len: int = MAX_MODEL_LEN,
    **tokenizer_config: Any,
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(SENTENCES * 3, trainer)
    backend.add_special_tokens([AddedToken(text, special=True) for text in specials])
    backend.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_bos_token": False, **tokenizer_config}
    if template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    # Two ids more than tokens: a padded vocabulary.
    vocab_size = backend.get_vocab_size() + 2
    (directory / "config.json").write_text(
        json.dumps({"vocab_size": vocab_size, "max_position_embeddings": max_model_len, "eos_token_id": EOS}), "utf-8"
    )
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_ids}), "utf-8")
    return directory


def ids_of(text: TextModel, what: str) -> list[int]:
    return list(text.tokenizer.encode(what, add_special_tokens=False))
