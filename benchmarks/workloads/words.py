"""Prompts of an exact number of tokens, as text that every server tokenises in the same way.

A byte-level BPE splits text in front of each blank and keeps a word that its vocabulary holds in one piece. So a text made
of such words, each with its blank, has as many tokens as words, and equal prefixes of words are equal prefixes of tokens.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import tokenizers

from benchmarks.errors import SpecError

_WORD = re.compile(r"[Ġ▁][a-z]{2,12}")
MIN_WORDS = 64
MAX_WORDS = 4096


class Words:
    """
    Args:
        words: each with its leading blank, each one token.
    """

    def __init__(self, words: tuple[str, ...]) -> None:
        self._words = np.array(words, dtype=object)

    def __len__(self) -> int:
        return len(self._words)

    def text(self, num_tokens: int, rng: np.random.Generator) -> str:
        """`num_tokens` words, drawn evenly."""
        return "".join(self._words[rng.integers(0, len(self._words), size=num_tokens)])


def load_words(model_dir: Path) -> Words:
    """The one-token words of a model, in the order of their ids.

    Raises:
        SpecError: there is no tokenizer.json, or it keeps too few words in one piece.
    """
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise SpecError(f"model: {path} is missing, so prompts of a known length cannot be made")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    vocabulary = tokenizer.get_vocab()
    candidates = sorted((token_id, token) for token, token_id in vocabulary.items() if _WORD.fullmatch(token))
    words = []
    for token_id, token in candidates:
        word = f" {token[1:]}"
        # twice, since some tokenizers treat the very first blank in a way of their own
        if tokenizer.encode(word + word, add_special_tokens=False).ids == [token_id, token_id]:
            words.append(word)
        if len(words) == MAX_WORDS:
            break
    if len(words) < MIN_WORDS:
        raise SpecError(f"model: {path} keeps {len(words)} words in one piece; {MIN_WORDS} are needed to make prompts")
    return Words(tuple(words))
