"""Where each token of a prompt begins in the prompt's text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from coordinator.tokenizer import Tokenizer


def prompt_offsets(ids: Sequence[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """Characters of `text` in front of each token.

    Two kinds of tokens write what is not in the text: special ones that the tokenizer put at the ends, and a first one whose
    space is the tokenizer's own (SentencePiece). A token that begins within a character starts where that character does.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets: list[int] = []
    offset = 0
    for token_id in ids:
        offsets.append(min(offset, len(text)))
        piece = decoder.decode(tokenizer.token_bytes.of(token_id))
        if token_id in tokenizer.special_ids and not text.startswith(piece, offset):
            continue
        if offset == 0 and piece.startswith(" ") and not text.startswith(" "):
            piece = piece[1:]
        offset += len(piece)
    return offsets
