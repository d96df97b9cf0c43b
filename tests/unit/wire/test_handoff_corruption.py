"""Blocks that arrive wrong: asked for again, and never decoded from."""

from __future__ import annotations

import pytest

from wire.control import FailureKind, HandoffTicket
from wire.handoff import HandoffMissing
from wire.handoff_receiver import Completed, Deliver, Failed, HandoffReceiver, Opened, Placed, ReceiverState, Send
from wire.ids import BlockId, HandoffId, Incarnation, RequestId, WorkerId
from wire.sequence import SampledToken

NUM_BLOCKS = 4
COMPLETE = Completed(NUM_BLOCKS, 60, SampledToken(7))


def opened() -> HandoffReceiver:
    blocks = tuple(map(BlockId, range(NUM_BLOCKS)))
    ticket = HandoffTicket(HandoffId("h"), WorkerId("decode-0"), Incarnation("d"), 1, blocks, 0, 10.0)
    receiver = HandoffReceiver(RequestId("r"), ticket, 60, 0.0)
    receiver.handle(Opened(fenced_by_window=True), 0.0)
    return receiver


def test_L7_a_flipped_byte_or_a_lost_block_is_sent_again() -> None:
    """1. Block 1 is corrupt, block 3 never came: both are asked for. 2. Once they are right, the KV is delivered."""
    receiver = opened()
    receiver.handle(Placed(0, (True, False, True)), 0.1)
    assert receiver.handle(COMPLETE, 0.2) == [Send(HandoffMissing(HandoffId("h"), (1, 3)))]
    receiver.handle(Placed(1, (True,)), 0.3)
    receiver.handle(Placed(3, (True,)), 0.3)
    assert Deliver(SampledToken(7)) in receiver.handle(COMPLETE, 0.4)
    assert receiver.state is ReceiverState.DELIVERED


def test_L7_what_stays_wrong_fails_and_is_never_delivered() -> None:
    receiver = opened()
    actions = []
    for attempt in range(3):
        receiver.handle(Placed(0, (True, True, False, True)), 0.1 * attempt)
        actions += receiver.handle(COMPLETE, 0.1 * attempt)
    assert [action.kind for action in actions if isinstance(action, Failed)] == [FailureKind.TRANSFER]
    assert not any(isinstance(action, Deliver) for action in actions)


@pytest.mark.parametrize(("num_blocks", "num_tokens"), [(NUM_BLOCKS - 1, 60), (NUM_BLOCKS, 59)])
def test_L7_a_short_write_fails(num_blocks: int, num_tokens: int) -> None:
    wrong = Completed(num_blocks, num_tokens, SampledToken(7))
    receiver = opened()
    receiver.handle(Placed(0, (True,) * NUM_BLOCKS), 0.1)
    actions = receiver.handle(wrong, 0.2)
    assert any(isinstance(action, Failed) for action in actions)
    assert not any(isinstance(action, Deliver) for action in actions)


def test_L7_a_block_that_was_right_and_is_overwritten_wrong_is_wrong() -> None:
    receiver = opened()
    receiver.handle(Placed(0, (True,) * NUM_BLOCKS), 0.1)
    receiver.handle(Placed(2, (False,)), 0.2)
    assert receiver.handle(COMPLETE, 0.3) == [Send(HandoffMissing(HandoffId("h"), (2,)))]
