"""Typed MessagePack: one strict encoder and one decoder per direction of a channel.

Nothing executable ever crosses a process border (no pickle), and nothing unknown is ignored: a tag or a field that this
version does not know is a `DecodeError`.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from wire.control import CoordinatorMessage, WorkerMessage
from wire.errors import DecodeError
from wire.handoff import ToDecode, ToPrefill

MessageT = TypeVar("MessageT")


class Codec(Generic[MessageT]):
    """Encodes anything, decodes only `MessageT`. Not for use by two threads at once."""

    def __init__(self, message_type: object) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(message_type)

    def encode(self, message: msgspec.Struct) -> bytes:
        return self._encoder.encode(message)

    def decode(self, data: bytes | memoryview) -> MessageT:
        """
        Raises:
            DecodeError: the bytes are not MessagePack, or not a message of this direction.
        """
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise DecodeError(str(error)) from error


def worker_codec() -> Codec[WorkerMessage]:
    """Decodes what a coordinator receives."""
    return Codec(WorkerMessage)


def coordinator_codec() -> Codec[CoordinatorMessage]:
    """Decodes what a worker receives from its coordinator."""
    return Codec(CoordinatorMessage)


def to_decode_codec() -> Codec[ToDecode]:
    """Decodes what a decode worker receives from a prefill worker."""
    return Codec(ToDecode)


def to_prefill_codec() -> Codec[ToPrefill]:
    """Decodes what a prefill worker receives from a decode worker."""
    return Codec(ToPrefill)
