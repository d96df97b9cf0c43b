"""Events of a stream, in pieces of any size."""

from __future__ import annotations

import pytest

from benchmarks.load.sse import BrokenStream, EventParser, StreamEvent

STREAM = (
    b": keep-alive\n\n"
    b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n'
    b'data: {"choices": [{"index": 0, "delta": {"content": "He"}}]}\r\n\r\n'
    b'data: {"choices": [{"index": 0, "text": "llo", "finish_reason": null}]}\n\n'
    b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}], "kvrelay_timeline": [{"prefill_ms": 3.5}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9,'
    b' "prompt_tokens_details": {"cached_tokens": 4}}}\n\n'
    b"data: [DONE]\n\n"
)
EVENTS = [
    StreamEvent(),
    StreamEvent(text="He"),
    StreamEvent(text="llo"),
    StreamEvent(finished=True, timeline={"prefill_ms": 3.5}),
    StreamEvent(prompt_tokens=7, output_tokens=2, cached_tokens=4),
    StreamEvent(done=True),
]


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
def test_pieces_of_any_size_give_the_same_events(size: int) -> None:
    parser = EventParser()
    pieces = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    assert [event for piece in pieces for event in parser.push(piece)] == EVENTS


def test_an_error_in_the_stream_is_raised_with_the_servers_words() -> None:
    with pytest.raises(BrokenStream, match="the worker died"):
        list(EventParser().push(b'data: {"error": {"message": "the worker died", "code": 503}}\n\n'))


def test_what_is_no_json_is_a_broken_stream() -> None:
    with pytest.raises(BrokenStream, match="cannot be read"):
        list(EventParser().push(b"data: {oops\n\n"))
