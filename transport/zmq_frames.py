"""What travels on a ZeroMQ channel: items. An item is a head, with its small payload in it; a large payload follows as raw
frames, its tail.

    head   magic "KVRZ" | version | kind | 2 spare | channel id (8) | granted bytes (8) | body of the kind
    tail   MESSAGE: one frame per buffer that is not empty; PUT_DATA: the bytes that fill the put's ranges, cut anywhere

Every frame is a ZeroMQ message of its own, never a part of a multipart message: libzmq 4.3.5 aborts the process when a
connection ends while a multipart message is half read (`!_more`, fq.cpp), which an ADR tells in full. ZeroMQ keeps the order
of a connection's messages, so a head says how many bytes of tail come and whatever comes next is it.

Every head carries a grant: bytes that the sender of the head has consumed since its last one, and the peer may send again.
Decoding never trusts a length: what does not fit is a `FrameError`, which ends the channel and nothing else.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from transport.base import ByteRange
from transport.errors import TransportError
from transport.regions import REGION_ID_BYTES

MAGIC = b"KVRZ"
VERSION = 2
CHANNEL_ID_BYTES = 8
MAX_REASON_BYTES = 512
INLINE_BYTES = 64 << 10
"""Payload up to this size travels in the head: copying it costs less than a frame of its own."""

_HEAD = struct.Struct(f"<4sBBxx{CHANNEL_ID_BYTES}sQ")
_LIMITS = struct.Struct("<QQd")
_MESSAGE = struct.Struct("<II")
_PUT_BEGIN = struct.Struct(f"<Q{REGION_ID_BYTES}sQI")
_RANGE = struct.Struct("<QQ")
_PUT_DATA = struct.Struct("<QQ")
_PUT_DONE = struct.Struct("<QB")
_REGION_ASK = struct.Struct(f"<Q{REGION_ID_BYTES}sQ")
_REGION_ANSWER = struct.Struct("<QB")


class FrameError(TransportError):
    """The peer sent something that this protocol does not contain."""


class Kind(IntEnum):
    HELLO = 1
    ACCEPT = 2
    MESSAGE = 3
    PUT_BEGIN = 4
    PUT_DATA = 5
    PUT_DONE = 6
    REGION_ASK = 7
    REGION_ANSWER = 8
    PULSE = 9  # only the head: life and grants
    BYE = 10
    BYE_ACK = 11
    RESET = 12
    ASIDE = 13


@dataclass(frozen=True, slots=True)
class Limits:
    """What one end holds to; told in HELLO and ACCEPT."""

    max_in_flight_bytes: int
    max_message_bytes: int
    liveness_s: float


@dataclass(frozen=True, slots=True)
class Hello:
    limits: Limits


@dataclass(frozen=True, slots=True)
class Accept:
    limits: Limits


@dataclass(frozen=True, slots=True)
class MessageHead:
    """`inline` holds all buffers, or nothing: then they follow."""

    header: bytes
    sizes: tuple[int, ...] = ()
    inline: bytes | memoryview = b""

    @property
    def tail_nbytes(self) -> int:
        return sum(self.sizes) - len(self.inline)


@dataclass(frozen=True, slots=True)
class PutBegin:
    put_id: int
    region_id: bytes
    key: int
    ranges: tuple[ByteRange, ...]


@dataclass(frozen=True, slots=True)
class PutData:
    """`inline`, and behind it the tail, are the next bytes of the put."""

    put_id: int
    tail_nbytes: int = 0
    inline: bytes | memoryview = b""


@dataclass(frozen=True, slots=True)
class PutDone:
    put_id: int
    refusal: str | None


@dataclass(frozen=True, slots=True)
class RegionAsk:
    ask_id: int
    region_id: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class RegionAnswer:
    ask_id: int
    found: bool


@dataclass(frozen=True, slots=True)
class Pulse:
    pass


@dataclass(frozen=True, slots=True)
class Bye:
    pass


@dataclass(frozen=True, slots=True)
class ByeAck:
    pass


@dataclass(frozen=True, slots=True)
class Reset:
    reason: str


@dataclass(frozen=True, slots=True)
class Aside:
    """Between the two ends of a kind of region that has a way of its own for bulk data."""

    payload: bytes | memoryview


Body = (
    Hello
    | Accept
    | MessageHead
    | PutBegin
    | PutData
    | PutDone
    | RegionAsk
    | RegionAnswer
    | Pulse
    | Bye
    | ByeAck
    | Reset
    | Aside
)


@dataclass(frozen=True, slots=True)
class Head:
    channel_id: bytes
    granted: int
    body: Body


def encode(channel_id: bytes, granted: int, body: Body) -> bytes:
    kind, rest = _encode_body(body)
    return _HEAD.pack(MAGIC, VERSION, kind, channel_id, granted) + rest


def decode(frame: memoryview) -> Head:
    """
    Raises:
        FrameError: not a head of this protocol and version.
    """
    if len(frame) < _HEAD.size:
        raise FrameError(f"head of {len(frame)} bytes is too short")
    magic, version, kind, channel_id, granted = _HEAD.unpack_from(frame)
    if magic != MAGIC:
        raise FrameError("wrong magic")
    if version != VERSION:
        raise FrameError(f"protocol version {version} is not {VERSION}")
    decode_body = _DECODERS.get(kind)
    if decode_body is None:
        raise FrameError(f"unknown frame kind {kind}")
    try:
        return Head(channel_id, granted, decode_body(frame[_HEAD.size :]))
    except struct.error as error:
        raise FrameError(f"body of frame kind {kind} has a wrong length") from error


def _encode_body(body: Body) -> tuple[Kind, bytes]:
    match body:
        case MessageHead():
            start = _MESSAGE.pack(len(body.header), len(body.sizes)) + struct.pack(f"<{len(body.sizes)}Q", *body.sizes)
            return Kind.MESSAGE, b"".join((start, body.header, body.inline))
        case PutData():
            return Kind.PUT_DATA, b"".join((_PUT_DATA.pack(body.put_id, body.tail_nbytes), body.inline))
        case PutBegin():
            head = _PUT_BEGIN.pack(body.put_id, body.region_id, body.key, len(body.ranges))
            return Kind.PUT_BEGIN, head + b"".join(_RANGE.pack(r.offset, r.nbytes) for r in body.ranges)
        case PutDone():
            return Kind.PUT_DONE, _PUT_DONE.pack(body.put_id, body.refusal is not None) + _encode_reason(body.refusal or "")
        case RegionAsk():
            return Kind.REGION_ASK, _REGION_ASK.pack(body.ask_id, body.region_id, body.nbytes)
        case RegionAnswer():
            return Kind.REGION_ANSWER, _REGION_ANSWER.pack(body.ask_id, body.found)
        case Hello():
            return Kind.HELLO, _encode_limits(body.limits)
        case Accept():
            return Kind.ACCEPT, _encode_limits(body.limits)
        case Pulse():
            return Kind.PULSE, b""
        case Bye():
            return Kind.BYE, b""
        case ByeAck():
            return Kind.BYE_ACK, b""
        case Reset():
            return Kind.RESET, _encode_reason(body.reason)
        case Aside():
            return Kind.ASIDE, bytes(body.payload)


def _encode_limits(limits: Limits) -> bytes:
    return _LIMITS.pack(limits.max_in_flight_bytes, limits.max_message_bytes, limits.liveness_s)


def _decode_limits(body: memoryview) -> Limits:
    limits = Limits(*_LIMITS.unpack(body))
    if limits.max_in_flight_bytes < 4096 or not 1 <= limits.max_message_bytes <= limits.max_in_flight_bytes:
        raise FrameError(f"limits make no sense: {limits}")
    if not (math.isfinite(limits.liveness_s) and limits.liveness_s > 0):
        raise FrameError(f"liveness_s makes no sense: {limits.liveness_s}")
    return limits


def _encode_reason(reason: str) -> bytes:
    return reason.encode()[:MAX_REASON_BYTES]


def _decode_reason(body: memoryview) -> str:
    return bytes(body[:MAX_REASON_BYTES]).decode(errors="replace")


def _decode_message(body: memoryview) -> MessageHead:
    header_nbytes, num_buffers = _MESSAGE.unpack_from(body)
    header_start = _MESSAGE.size + 8 * num_buffers
    if len(body) < header_start + header_nbytes:
        raise FrameError(
            f"message head of {len(body)} bytes cannot hold {num_buffers} sizes and {header_nbytes} bytes of header"
        )
    sizes = struct.unpack_from(f"<{num_buffers}Q", body, _MESSAGE.size)
    inline = body[header_start + header_nbytes :]
    if len(inline) not in (0, sum(sizes)):
        raise FrameError(f"message of {sum(sizes)} bytes of buffers carries {len(inline)}")
    return MessageHead(bytes(body[header_start : header_start + header_nbytes]), sizes, inline)


def _decode_put_data(body: memoryview) -> PutData:
    put_id, tail_nbytes = _PUT_DATA.unpack_from(body)
    inline = body[_PUT_DATA.size :]
    if not tail_nbytes and not len(inline):
        raise FrameError("put data without data")
    return PutData(put_id, tail_nbytes, inline)


def _decode_put_begin(body: memoryview) -> PutBegin:
    put_id, region_id, key, num_ranges = _PUT_BEGIN.unpack_from(body)
    rest = body[_PUT_BEGIN.size :]
    if len(rest) != num_ranges * _RANGE.size:
        raise FrameError(f"put of {num_ranges} ranges has {len(rest)} bytes of them")
    ranges = tuple(ByteRange(offset, nbytes) for offset, nbytes in _RANGE.iter_unpack(rest))
    if not ranges or any(r.nbytes == 0 for r in ranges):
        raise FrameError("put with an empty range")
    return PutBegin(put_id, region_id, key, ranges)


def _decode_put_done(body: memoryview) -> PutDone:
    put_id, refused = _PUT_DONE.unpack_from(body)
    return PutDone(put_id, _decode_reason(body[_PUT_DONE.size :]) if refused else None)


def _decode_region_answer(body: memoryview) -> RegionAnswer:
    ask_id, found = _REGION_ANSWER.unpack(body)
    return RegionAnswer(ask_id, bool(found))


def _decode_nothing(make: Callable[[], Body]) -> Callable[[memoryview], Body]:
    def decode_body(body: memoryview) -> Body:
        if len(body):
            raise FrameError(f"{len(body)} bytes behind a head that has no body")
        return make()

    return decode_body


_DECODERS: dict[int, Callable[[memoryview], Body]] = {
    Kind.HELLO: lambda body: Hello(_decode_limits(body)),
    Kind.ACCEPT: lambda body: Accept(_decode_limits(body)),
    Kind.MESSAGE: _decode_message,
    Kind.PUT_BEGIN: _decode_put_begin,
    Kind.PUT_DATA: _decode_put_data,
    Kind.PUT_DONE: _decode_put_done,
    Kind.REGION_ASK: lambda body: RegionAsk(*_REGION_ASK.unpack(body)),
    Kind.REGION_ANSWER: _decode_region_answer,
    Kind.PULSE: _decode_nothing(Pulse),
    Kind.BYE: _decode_nothing(Bye),
    Kind.BYE_ACK: _decode_nothing(ByeAck),
    Kind.RESET: lambda body: Reset(_decode_reason(body)),
    Kind.ASIDE: Aside,
}
