"""Token ids to text, one at a time, as exact as decoding them all at once.

Bytes go through an incremental UTF-8 decoder, so only the bytes of a character that is not complete yet are held back, each
token costs the same, and bytes that can never become a character turn into U+FFFD exactly as in a whole decode. A character
that is still incomplete when the sequence ends is left out: nobody can read half a character, and a limit in the middle of
an emoji is no reason to show a replacement sign.
"""

from __future__ import annotations

import codecs
from collections.abc import Set

from coordinator.token_bytes import TokenBytes


class Detokenizer:
    """Text of one sequence's output. Special tokens add nothing."""

    def __init__(self, token_bytes: TokenBytes, special_ids: Set[int]) -> None:
        self._token_bytes = token_bytes
        self._special_ids = special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes; often one word, sometimes none."""
        if token_id in self._special_ids:
            return ""
        return self._decoder.decode(self._token_bytes.of(token_id))
