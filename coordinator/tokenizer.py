"""A model's tokenizer, read from `tokenizer.json` and `tokenizer_config.json` without importing transformers.

Beginning and end tokens follow transformers 5: `add_bos_token` or `add_eos_token` in the config replace the post-processor
of `tokenizer.json`; without either, that post-processor decides.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from coordinator.token_bytes import TokenBytes

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Below this, one call of `encode` holds the interpreter lock for under a millisecond; above, the batch call gives it up.
_MAX_CHARS_UNDER_LOCK = 4096


class Tokenizer:
    """Text to ids and back. Safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
        """
        Raises:
            UnsupportedTokenizer: the decoder's kind is not known.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = _named_special_tokens(config)
        self.token_bytes = TokenBytes(backend)
        named = {backend.token_to_id(text) for text in self.special_tokens.values()}
        flagged = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
        self.special_ids = frozenset(flagged | {token_id for token_id in named if token_id is not None})
        self._own_ends = "add_bos_token" in config or "add_eos_token" in config or backend.post_processor is None
        self._prefix = self._end_ids("bos_token", bool(config.get("add_bos_token")))
        self._suffix = self._end_ids("eos_token", bool(config.get("add_eos_token")))

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """
        Raises:
            FileNotFoundError: no `tokenizer.json` there.
            UnsupportedTokenizer: the decoder's kind is not known.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: the model needs a fast tokenizer")
        config_path = directory / "tokenizer_config.json"
        config = json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}
        return cls(tokenizers.Tokenizer.from_file(str(path)), config)

    def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        """Ids of `text`. A special token's literal text becomes that token, as everywhere in this field.

        `text` must be encodable as UTF-8. Long texts give up the interpreter lock: call from a thread to keep a loop alive.
        """
        by_backend = add_special_tokens and not self._own_ends
        if len(text) <= _MAX_CHARS_UNDER_LOCK:
            ids = self._backend.encode(text, add_special_tokens=by_backend).ids
        else:
            ids = self._backend.encode_batch_fast([text], add_special_tokens=by_backend)[0].ids
        if add_special_tokens and self._own_ends:
            return (*self._prefix, *ids, *self._suffix)
        return tuple(ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def to_json(self) -> str:
        """As in `tokenizer.json`."""
        return self._backend.to_str()

    def id_of(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def token_text(self, token_id: int) -> tuple[str, bytes | None]:
        """How a token is named in logprobs, and its bytes.

        A token that is not text by itself is written ``bytes:\\xf0\\x9f``; an id that no token has, ``token_id:49151``.
        """
        if token_id not in self.token_bytes:
            return f"token_id:{token_id}", None
        raw = self.token_bytes.of(token_id)
        try:
            return raw.decode("utf-8"), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

    def _end_ids(self, name: str, wanted: bool) -> tuple[int, ...]:
        token_id = self._backend.token_to_id(self.special_tokens[name]) if wanted and name in self.special_tokens else None
        return () if token_id is None else (token_id,)


def _named_special_tokens(config: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found
