"""The exact bytes that each token adds to a text.

A token is not a string: a character may be split over several tokens. Bytes always join right, so everything that must be
exact (streams, logprobs) is built on them. The table is read from the tokenizer's own decoder:

    ByteLevel                          GPT-2's printable stand-ins for bytes; a token with any other character is plain text
    Replace(▁ → space) + ByteFallback  SentencePiece: `▁` is a space, `<0xE2>` is one byte
    Metaspace                          the same without bytes

`Strip` (drop the space in front of a whole text) is left out on purpose: output continues a prompt, so its first space is
real.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnsupportedTokenizer(ValueError):
    """The tokenizer's decoder is of a kind whose bytes are not known here."""


class TokenBytes:
    """Maps token ids to bytes; ids that no token has (a padded vocabulary) map to none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """
        Raises:
            UnsupportedTokenizer: names the decoder.
        """
        self._byte_level = False
        self._byte_fallback = False
        self._replace: list[tuple[str, str]] = []
        for decoder in _flatten(json.loads(tokenizer.to_str()).get("decoder")):
            self._learn(decoder)
        stand_ins = _byte_level_stand_ins()
        self._bytes: dict[int, bytes] = {
            token_id: self._to_bytes(token, stand_ins) for token, token_id in tokenizer.get_vocab(True).items()
        }
        self.longest = max((len(piece) for piece in self._bytes.values()), default=1)

    def of(self, token_id: int) -> bytes:
        return self._bytes.get(token_id, b"")

    def __contains__(self, token_id: int) -> bool:
        return token_id in self._bytes

    def _learn(self, decoder: dict[str, Any]) -> None:
        kind = decoder.get("type")
        if kind == "ByteLevel":
            self._byte_level = True
        elif kind == "ByteFallback":
            self._byte_fallback = True
        elif kind == "Metaspace":
            self._replace.append((decoder["replacement"], " "))
        elif kind == "Replace" and "String" in decoder["pattern"]:
            self._replace.append((decoder["pattern"]["String"], decoder["content"]))
        elif kind not in ("Fuse", "Strip"):
            raise UnsupportedTokenizer(f"the tokenizer's decoder {kind!r} is not supported")

    def _to_bytes(self, token: str, stand_ins: dict[str, int]) -> bytes:
        if self._byte_level:
            try:
                return bytes([stand_ins[char] for char in token])
            except KeyError:
                return token.encode("utf-8")
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self._replace:
            token = token.replace(old, new)
        return token.encode("utf-8")


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        raise UnsupportedTokenizer("the tokenizer has no decoder")
    if decoder.get("type") == "Sequence":
        return [inner for item in decoder["decoders"] for inner in _flatten(item)]
    return [decoder]


def _byte_level_stand_ins() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 bytes stand for themselves, the rest are moved to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    moved = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + rank): byte for rank, byte in enumerate(moved)})
    return table
