from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.base import ByteRange
from transport.flow import GrantAccount
from transport.regions import RegionTable
from transport.zmq_frames import (
    INLINE_BYTES,
    Accept,
    Aside,
    Bye,
    ByeAck,
    FrameError,
    Head,
    Hello,
    Limits,
    MessageHead,
    Pulse,
    PutBegin,
    PutData,
    PutDone,
    RegionAnswer,
    RegionAsk,
    Reset,
    decode,
    encode,
)
from transport.zmq_incoming import Incoming, Item, buffers_of
from transport.zmq_placement import Placer, put_frames

CHANNEL = b"channel1"
u64 = st.integers(0, 2**64 - 1)
limits = st.builds(
    lambda window, message, liveness: Limits(window, min(message, window), liveness),
    st.integers(4096, 2**60),
    st.integers(1, 2**60),
    st.floats(0.001, 1000),
)
ranges = st.lists(st.builds(ByteRange, u64, st.integers(1, 2**64 - 1)), min_size=1, max_size=5).map(tuple)
reason = st.text(max_size=50)
bodies = st.one_of(
    st.builds(Hello, limits),
    st.builds(Accept, limits),
    st.builds(MessageHead, st.binary(max_size=30), st.lists(st.integers(2, 2**40), max_size=5).map(tuple)),
    st.builds(
        lambda header, inline: MessageHead(header, (len(inline), 0), inline), st.binary(max_size=9), st.binary(max_size=9)
    ),
    st.builds(PutBegin, u64, st.binary(min_size=16, max_size=16), u64, ranges),
    st.builds(PutData, u64, st.integers(1, 2**64 - 1)),
    st.builds(PutData, u64, st.integers(0, 2**64 - 1), st.binary(min_size=1, max_size=30)),
    st.builds(PutDone, u64, st.none() | reason),
    st.builds(RegionAsk, u64, st.binary(min_size=16, max_size=16), u64),
    st.builds(RegionAnswer, u64, st.booleans()),
    st.builds(Pulse),
    st.builds(Bye),
    st.builds(ByeAck),
    st.builds(Reset, reason),
    st.builds(Aside, st.binary(max_size=40)),
)


@settings(max_examples=60, deadline=None)
@given(bodies, u64)
def test_frames_survive_the_wire(body: object, granted: int) -> None:
    assert decode(memoryview(encode(CHANNEL, granted, body))) == Head(CHANNEL, granted, body)  # type: ignore[arg-type]


@given(st.binary(max_size=200))
def test_garbage_is_a_frame_error(garbage: bytes) -> None:
    for frame in (garbage, encode(CHANNEL, 0, Pulse())[:6] + garbage):
        try:
            decode(memoryview(frame))
        except FrameError:
            continue
        assert frame.startswith(b"KVRZ")


@settings(max_examples=60, deadline=None)
@given(bodies, st.data())
def test_cut_and_lengthened_frames(body: object, data: st.DataObject) -> None:
    whole = encode(CHANNEL, 0, body)  # type: ignore[arg-type]
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    for damaged in (cut, whole + b"x"):
        if isinstance(body, Reset | PutDone | PutData | Aside) and len(damaged) >= 24 + 16 * isinstance(body, PutData):
            continue  # what ends them may have any length
        if isinstance(body, MessageHead) and len(damaged) == len(whole) - len(body.inline):
            continue  # its buffers follow
        with pytest.raises(FrameError):
            decode(memoryview(damaged))


def test_another_version_is_named() -> None:
    frame = bytearray(encode(CHANNEL, 0, Pulse()))
    frame[4] = 9
    with pytest.raises(FrameError, match="version 9"):
        decode(memoryview(frame))


def test_limits_without_sense() -> None:
    for bad in (
        Limits(1, 1, 1.0),
        Limits(5000, 0, 1.0),
        Limits(5000, 6000, 1.0),
        Limits(5000, 1, float("nan")),
        Limits(5000, 1, 0),
    ):
        with pytest.raises(FrameError, match="no sense"):
            decode(memoryview(encode(CHANNEL, 0, Hello(bad))))


def test_puts_out_of_turn() -> None:
    table = RegionTable(b"testtest")
    region = table.create(4096, None)
    region.open_window(1, [ByteRange(0, 100)])
    placer = Placer(table.find)
    begin = PutBegin(1, region.name.region_id, 1, (ByteRange(0, 10),))

    with pytest.raises(FrameError, match="did not begin"):
        placer.data(PutData(1), [memoryview(b"x")])
    assert placer.begin(begin) is None
    with pytest.raises(FrameError, match="out of turn"):
        placer.begin(PutBegin(2, region.name.region_id, 1, (ByteRange(0, 10),)))
    with pytest.raises(FrameError, match="more bytes"):
        placer.data(PutData(1), [memoryview(bytes(11))])
    assert placer.data(PutData(1), [memoryview(b"abcde")]) is None
    assert placer.data(PutData(1), [memoryview(b"fg"), memoryview(b"hij")]) == PutDone(1, None)
    assert bytes(region.memory[:11]) == b"abcdefghij\0"
    with pytest.raises(FrameError, match="out of turn"):
        placer.begin(begin)

    # A refused put's data is on its way already, and dropped.
    refused = placer.begin(PutBegin(2, region.name.region_id, 1, (ByteRange(0, 10), ByteRange(99, 2))))
    assert refused is not None
    assert refused.refusal
    assert placer.data(PutData(2), [memoryview(b"zzz")]) is None
    unknown = placer.begin(PutBegin(3, bytes(16), 1, (ByteRange(0, 10),)))
    assert unknown == PutDone(3, "no such region")
    assert bytes(region.memory[:11]) == b"abcdefghij\0"
    table.close()
    assert len(table) == 0


def test_a_tail_is_what_was_announced() -> None:
    incoming = Incoming(GrantAccount(1 << 20), 1 << 20, 1 << 20)
    message = Head(CHANNEL, 0, MessageHead(b"h", (3, 0, 2)))
    # 1. Nothing follows a small item.
    assert incoming.begin(Head(CHANNEL, 0, Pulse())) == Item(Head(CHANNEL, 0, Pulse()))
    assert not incoming.is_open
    # 2. A large one is complete with its last byte.
    assert incoming.begin(message) is None
    assert incoming.add(memoryview(b"abc")) is None
    item = incoming.add(memoryview(b"de"))
    assert item is not None
    assert [bytes(buffer) for buffer in buffers_of(message.body, item.tail)] == [b"abc", b"", b"de"]  # type: ignore[arg-type]
    assert not incoming.is_open
    # 3. More, or nothing, is not what was announced; nor are frames cut elsewhere.
    for wrong in (b"", b"abcdef"):
        incoming = Incoming(GrantAccount(1 << 20), 1 << 20, 1 << 20)
        incoming.begin(message)
        with pytest.raises(FrameError, match="missing"):
            incoming.add(memoryview(wrong))
    for cut in ((b"ab", b"cde"), (b"abcde",), (b"abc", b"d", b"e")):
        with pytest.raises(FrameError, match="frames"):
            buffers_of(MessageHead(b"h", (3, 0, 2)), [memoryview(part) for part in cut])


@given(st.lists(st.sampled_from([1, 100, INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1]), min_size=1, max_size=6))
def test_a_piece_of_a_put_arrives_as_it_was(sizes: list[int]) -> None:
    piece = [memoryview(bytes([n]) * size) for n, size in enumerate(sizes)]
    head, tail = put_frames(1, piece)
    assert b"".join((head.inline, *tail)) == b"".join(piece)
    assert head.tail_nbytes == sum(map(len, tail))
    assert all(tail)
