"""Typed MessagePack with a checksum: one strict encoder and one decoder per direction of a channel.

A message is MessagePack and the CRC-32 of it (4 bytes, little-endian): a damaged one that still reads as a message, with
another token in a prompt or another block in a ticket, would end in a wrong text.

Nothing executable ever crosses a process border (no pickle), and nothing unknown is ignored: a tag or a field that this
version does not know is a `DecodeError`.
"""

from __future__ import annotations

import zlib
from typing import Generic, TypeVar

import msgspec

from wire.control import CoordinatorMessage, WorkerMessage
from wire.errors import DecodeError
from wire.handoff import ToDecode, ToPrefill

MessageT = TypeVar("MessageT")

_CHECKSUM_BYTES = 4


def seal(body: bytes) -> bytes:
    """`body` and its checksum."""
    return body + zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "little")


def unseal(data: bytes | memoryview) -> memoryview:
    """The body of what `seal` made.

    Raises:
        DecodeError: too short, or damaged.
    """
    view = memoryview(data)
    body, checksum = view[:-_CHECKSUM_BYTES], view[-_CHECKSUM_BYTES:]
    if len(view) <= _CHECKSUM_BYTES or int.from_bytes(checksum, "little") != zlib.crc32(body):
        raise DecodeError(f"{len(view)} bytes whose checksum does not fit: damaged, or no message")
    return body


class MessageEncoder:
    """Encodes any message, for whoever does not decode. Not for use by two threads at once."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: msgspec.Struct) -> bytes:
        return seal(self._encoder.encode(message))


class Codec(Generic[MessageT]):
    """Encodes anything, decodes only `MessageT`. Not for use by two threads at once."""

    def __init__(self, message_type: object) -> None:
        self._encoder = MessageEncoder()
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(message_type)

    def encode(self, message: msgspec.Struct) -> bytes:
        return self._encoder.encode(message)

    def decode(self, data: bytes | memoryview) -> MessageT:
        """
        Raises:
            DecodeError: the bytes are damaged, not MessagePack, or not a message of this direction.
        """
        body = unseal(data)
        try:
            return self._decoder.decode(body)
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
