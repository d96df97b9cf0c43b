"""What the two ends of a UCX lane tell each other, without UCX."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.base import ByteRange
from transport.ucx_frames import Done, Grant, Open, Opened, Outcome, Put, decode_aside, encode_aside
from transport.zmq_frames import FrameError

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
pieces = st.lists(st.builds(ByteRange, u64, st.integers(1, 2**64 - 1)), min_size=1, max_size=5).map(tuple)
version = st.tuples(st.integers(0, 65535), st.integers(0, 65535))
address = st.binary(min_size=1, max_size=300)
asides = st.one_of(
    st.builds(Open, u32, version, st.binary(min_size=16, max_size=16), address),
    st.builds(Opened, u32, version, address),
    st.builds(lambda lane, reason: Opened(lane, (1, 2), b"", reason), u32, st.text(max_size=50)),
    st.builds(Put, u64, u32, st.binary(min_size=16, max_size=16), u64, pieces),
    st.builds(Grant, u64, u32),
    st.builds(Done, u64, st.sampled_from(Outcome), st.text(max_size=50)),
)


@settings(max_examples=60, deadline=None)
@given(asides)
def test_asides_survive_the_wire(aside: object) -> None:
    assert decode_aside(memoryview(encode_aside(aside))) == aside  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=100))
def test_garbage_is_a_frame_error(garbage: bytes) -> None:
    for kind in range(8):
        try:
            decode_aside(memoryview(bytes([kind]) + garbage))
        except FrameError:
            continue


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\x00",
        b"\x09rest",
        encode_aside(Open(1, (1, 21), bytes(16), b"a"))[:-1],
        encode_aside(Open(1, (1, 21), bytes(16), b"a")) + bytes(1 << 17),
        encode_aside(Put(1, 1, bytes(16), 1, (ByteRange(0, 1),)))[:-1],
        encode_aside(Put(1, 1, bytes(16), 1, (ByteRange(0, 1),))) + b"x",
        encode_aside(Put(1, 1, bytes(16), 1, ())),
        encode_aside(Put(1, 1, bytes(16), 1, (ByteRange(5, 0),))),
        encode_aside(Grant(1, 1)) + b"x",
        encode_aside(Done(1, Outcome.PLACED))[:-1] + b"\x07",
    ],
)
def test_damaged_asides_are_frame_errors(damaged: bytes) -> None:
    with pytest.raises(FrameError):
        decode_aside(memoryview(damaged))
