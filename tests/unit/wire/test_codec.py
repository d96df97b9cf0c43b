"""The codec: everything comes back as it went, and nothing but `DecodeError` comes out of garbage."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire import codec
from wire.control import FirstToken, PrefillStages, Reserve
from wire.errors import DecodeError
from wire.handoff import HandoffAck, HandoffOpen
from wire.ids import HandoffId, RequestId
from wire.sequence import SampledToken, SamplingParams, SequenceSpec, StopRules

DECODERS = (codec.worker_codec, codec.coordinator_codec, codec.to_decode_codec, codec.to_prefill_codec)

SPEC = SequenceSpec(
    RequestId("r"),
    (1, 2, 3),
    SamplingParams(seed=-(2**63), temperature=0.5, logit_bias={7: -100.0}, num_logprobs=0),
    StopRules(max_tokens=5, eos_token_ids=(2,)),
    resumed=(9,),
    cache_salt="s",
)


def test_messages_come_back_equal() -> None:
    control = codec.coordinator_codec()
    reserve = Reserve(SPEC, HandoffId("h"), 30.0)
    assert control.decode(control.encode(reserve)) == reserve
    worker = codec.worker_codec()
    first = FirstToken(RequestId("r"), SampledToken(5, -0.25, ((5, -0.25), (6, -2.0))), None, PrefillStages(0.1, 0.2, 64))
    assert worker.decode(worker.encode(first)) == first


def test_a_message_of_the_other_direction_is_refused() -> None:
    data = codec.to_decode_codec().encode(HandoffAck(HandoffId("h")))
    with pytest.raises(DecodeError, match="handoff-ack"):
        codec.to_decode_codec().decode(data)


def test_unknown_fields_and_wrong_types_are_refused() -> None:
    to_decode = codec.to_decode_codec()
    fields = {"type": "handoff-open", "handoff_id": "h", "request_id": "r", "window_key": 1}
    assert to_decode.decode(codec.seal(msgspec.msgpack.encode(fields))) == HandoffOpen(HandoffId("h"), RequestId("r"), 1)
    for wrong in (
        {**fields, "extra": 1},
        {**fields, "window_key": "1"},
        {**fields, "type": "nope"},
        {"type": "handoff-open"},
    ):
        with pytest.raises(DecodeError):
            to_decode.decode(codec.seal(msgspec.msgpack.encode(wrong)))


@pytest.mark.parametrize("make", DECODERS)
@given(data=st.binary(max_size=200))
def test_garbage_raises_decode_error_alone(make: type, data: bytes) -> None:
    for garbage in (data, codec.seal(data)):
        with pytest.raises(DecodeError):
            make().decode(garbage)


def test_a_damaged_message_is_refused_whatever_bit_it_was() -> None:
    """Many a flipped bit of a prompt or a block id would read as a message."""
    control = codec.coordinator_codec()
    data = control.encode(Reserve(SPEC, HandoffId("h"), 30.0))
    for place in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        with pytest.raises(DecodeError, match="checksum"):
            control.decode(bytes(damaged))
    for length in range(len(data)):
        with pytest.raises(DecodeError, match="checksum"):
            control.decode(data[:length])


@pytest.mark.parametrize("make", DECODERS)
def test_deep_nesting_is_a_decode_error(make: type) -> None:
    with pytest.raises(DecodeError):
        make().decode(codec.seal(b"\x91" * 200_000 + b"\xc0"))
