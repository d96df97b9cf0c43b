"""What the two ends of a UCX lane tell each other, as asides on their channel.

    writer   OPEN (lane, region, address)                     owner   OPENED (lane, address), or why not
    writer   PUT (id, lane, region, key, pieces)              owner   GRANT (id, how many more pieces it has posted), …
    writer   sends the pieces that were granted, by UCX       owner   DONE (id): in place, refused, or to be tried again

Decoding never trusts a length: what does not fit is a `FrameError`, which ends the channel.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from transport.base import ByteRange
from transport.regions import REGION_ID_BYTES
from transport.zmq_frames import MAX_REASON_BYTES, FrameError

MAX_PIECES = 1 << 18
MAX_ADDRESS_BYTES = 64 << 10

_KIND = struct.Struct("<B")
_LANE = struct.Struct("<IHH")  # number, and UCX's version
_OPEN = struct.Struct(f"<IHH{REGION_ID_BYTES}s")
_PUT = struct.Struct(f"<QI{REGION_ID_BYTES}sQI")
_PIECE = struct.Struct("<QQ")
_GRANT = struct.Struct("<QI")
_DONE = struct.Struct("<QB")


class Outcome(IntEnum):
    PLACED = 0
    REFUSED = 1
    AGAIN = 2
    """The owner closed the lane under this put, for the sake of another's window."""


Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Open:
    """`region_id`, which is secret, shows that the writer was given a region's descriptor: UCX parses addresses carelessly
    (a damaged one aborts the process), so it gets none from strangers, nor from another version of itself."""

    lane: int
    version: Version
    region_id: bytes
    address: bytes


@dataclass(frozen=True, slots=True)
class Opened:
    """`address` is empty when the owner could not open the lane; `reason` says why."""

    lane: int
    version: Version
    address: bytes
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Put:
    put_id: int
    lane: int
    region_id: bytes
    key: int
    pieces: tuple[ByteRange, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    put_id: int
    count: int


@dataclass(frozen=True, slots=True)
class Done:
    put_id: int
    outcome: Outcome
    reason: str = ""


Aside = Open | Opened | Put | Grant | Done


def encode_aside(aside: Aside) -> bytes:
    match aside:
        case Open():
            return _KIND.pack(1) + _OPEN.pack(aside.lane, *aside.version, aside.region_id) + aside.address
        case Opened():
            rest = aside.address or aside.reason.encode()[:MAX_REASON_BYTES]
            return _KIND.pack(2) + _LANE.pack(aside.lane, *aside.version) + _KIND.pack(bool(aside.address)) + rest
        case Put():
            head = _PUT.pack(aside.put_id, aside.lane, aside.region_id, aside.key, len(aside.pieces))
            return b"".join((_KIND.pack(3), head, *(_PIECE.pack(p.offset, p.nbytes) for p in aside.pieces)))
        case Grant():
            return _KIND.pack(4) + _GRANT.pack(aside.put_id, aside.count)
        case Done():
            return _KIND.pack(5) + _DONE.pack(aside.put_id, aside.outcome) + aside.reason.encode()[:MAX_REASON_BYTES]


def decode_aside(payload: memoryview) -> Aside:
    """
    Raises:
        FrameError: not one of these.
    """
    if not len(payload):
        raise FrameError("an empty aside")
    kind, body = payload[0], payload[1:]
    try:
        match kind:
            case 1:
                lane, major, minor, region_id = _OPEN.unpack_from(body)
                return Open(lane, (major, minor), region_id, _address(body[_OPEN.size :]))
            case 2:
                return _decode_opened(body)
            case 3:
                return _decode_put(body)
            case 4:
                return Grant(*_GRANT.unpack(body))
            case 5:
                put_id, outcome = _DONE.unpack_from(body)
                return Done(put_id, Outcome(outcome), _text(body[_DONE.size :]))
    except (struct.error, ValueError) as error:
        raise FrameError(f"aside {kind} does not decode: {error}") from error
    raise FrameError(f"unknown aside {kind}")


def _decode_opened(body: memoryview) -> Opened:
    lane, major, minor = _LANE.unpack_from(body)
    (works,) = _KIND.unpack_from(body, _LANE.size)
    rest = body[_LANE.size + _KIND.size :]
    return Opened(lane, (major, minor), _address(rest)) if works else Opened(lane, (major, minor), b"", _text(rest))


def _decode_put(body: memoryview) -> Put:
    put_id, lane, region_id, key, num_pieces = _PUT.unpack_from(body)
    rest = body[_PUT.size :]
    if not 0 < num_pieces <= MAX_PIECES or len(rest) != num_pieces * _PIECE.size:
        raise FrameError(f"put of {num_pieces} pieces has {len(rest)} bytes of them")
    pieces = tuple(ByteRange(offset, nbytes) for offset, nbytes in _PIECE.iter_unpack(rest))
    if any(piece.nbytes == 0 for piece in pieces):
        raise FrameError("put with an empty piece")
    return Put(put_id, lane, region_id, key, pieces)


def _address(body: memoryview) -> bytes:
    if not 0 < len(body) <= MAX_ADDRESS_BYTES:
        raise FrameError(f"a UCX address of {len(body)} bytes")
    return bytes(body)


def _text(body: memoryview) -> str:
    return bytes(body[:MAX_REASON_BYTES]).decode(errors="replace")
