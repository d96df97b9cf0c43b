"""All that the front door must know of a model: tokenizer, chat template, end tokens and sizes; no weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.chat_template import ChatTemplate
from coordinator.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextModel:
    """`eos_token_ids` joins what config.json, generation_config.json and the tokenizer name, sorted."""

    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_model_len: int

    @classmethod
    def load(
        cls, directory: Path, name: str | None = None, max_model_len: int | None = None, chat_template: str | None = None
    ) -> TextModel:
        """
        Args:
            directory: a Hugging Face model directory.
            name: the served name; the directory's by default.
            max_model_len: a limit below the model's own.
            chat_template: Jinja text that replaces the model's.

        Raises:
            FileNotFoundError: config.json or tokenizer.json is missing.
            ValueError: a file does not hold what it must (the text names it).
        """
        config = _read_object(directory / "config.json")
        text_config = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
        assert text_config is not None
        own_len = _positive(text_config, ("max_position_embeddings", "n_positions", "n_ctx"), directory)
        if max_model_len is not None and not 1 <= max_model_len <= own_len:
            raise ValueError(f"max_model_len {max_model_len} is not within 1 and the model's {own_len}")
        tokenizer = Tokenizer.load(directory)
        source = chat_template if chat_template is not None else _chat_template_source(directory)
        return cls(
            name=name if name is not None else directory.resolve().name,
            tokenizer=tokenizer,
            chat_template=None if source is None else ChatTemplate(source, tokenizer.special_tokens),
            eos_token_ids=_eos_token_ids(directory, text_config, tokenizer),
            vocab_size=_positive(text_config, ("vocab_size",), directory),
            max_model_len=own_len if max_model_len is None else max_model_len,
        )


def _read_object(path: Path, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    value = json.loads(path.read_text("utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return value


def _positive(config: dict[str, Any], names: tuple[str, ...], directory: Path) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    raise ValueError(f"{directory / 'config.json'} has no {names[0]}")


def _eos_token_ids(directory: Path, config: dict[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    generation = _read_object(directory / "generation_config.json", optional=True)
    found: set[int] = set()
    for value in (config.get("eos_token_id"), generation.get("eos_token_id")):
        found.update(item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int))
    eos = tokenizer.special_tokens.get("eos_token")
    eos_id = None if eos is None else tokenizer.id_of(eos)
    if eos_id is not None:
        found.add(eos_id)
    return tuple(sorted(found))


def _chat_template_source(directory: Path) -> str | None:
    """`chat_template.jinja` goes before the entry in tokenizer_config.json; of several named ones, `default` is taken."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    value = _read_object(directory / "tokenizer_config.json", optional=True).get("chat_template")
    if isinstance(value, list):
        value = next(
            (item.get("template") for item in value if isinstance(item, dict) and item.get("name") == "default"), None
        )
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{directory / 'tokenizer_config.json'}: chat_template is not text")
    return value
