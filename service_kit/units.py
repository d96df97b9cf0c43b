"""Sizes in bytes, as people write them."""

from __future__ import annotations

import re

_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)


class ByteSize(int):
    """A number of bytes; written as ``2GiB``, ``512MiB``, ``1.5GB`` or a plain number."""

    @classmethod
    def parse(cls, value: object) -> ByteSize:
        """
        Raises:
            ValueError: not a size.
        """
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return cls(value)
        match = _PATTERN.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            raise ValueError("Expected a size such as 2GiB, 512MiB or a number of bytes")
        return cls(int(float(match[1]) * _FACTORS[(match[2] or "").lower()]))
