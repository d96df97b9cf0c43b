"""How large a message may be."""

from __future__ import annotations

from collections.abc import Sequence

from transport.options import MAX_HEADER_BYTES


def check_message(header: bytes, buffers: Sequence[memoryview], max_message_bytes: int) -> int:
    """The bytes of a message.

    Raises:
        ValueError: header or message are too large.
    """
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"header of {len(header)} bytes exceeds {MAX_HEADER_BYTES}")
    nbytes = len(header) + sum(len(buffer) for buffer in buffers)
    if nbytes > max_message_bytes:
        raise ValueError(f"message of {nbytes} bytes exceeds max_message_bytes = {max_message_bytes}; use put for bulk data")
    return nbytes
