"""Both sides of a hand-off over a simulated channel, driven through every order of events that hypothesis finds.

Invariants, whatever is dropped, corrupted, cancelled or lost:
- D's blocks are never free while P may still write (a put is in flight on a transport that the window does not fence);
- P's blocks are never released while a put reads them;
- each side ends exactly once: delivered or freed, and released;
- D delivers only when every block it needs is intact.
"""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from wire import handoff_receiver as receiving
from wire import handoff_sender as sending
from wire.control import HandoffTicket
from wire.handoff import (
    BlocksPlaced,
    HandoffAbort,
    HandoffAck,
    HandoffCancel,
    HandoffComplete,
    HandoffMissing,
    HandoffOpen,
    HandoffOpened,
)
from wire.ids import BlockId, HandoffId, Incarnation, RequestId, WorkerId
from wire.sequence import SampledToken

LEASE_S = 30.0
FAULTS = (
    "prefill cancels", "decode cancels", "channel breaks", "prefill dies", "lease", "a word is lost", "a word is said twice",
)  # fmt: skip
FIRST_TOKEN = SampledToken(7)


class HandoffPair(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(0, 6), fenced=st.booleans(), faults=st.sets(st.sampled_from(FAULTS), max_size=2))
    def start(self, num_blocks: int, fenced: bool, faults: set[str]) -> None:
        """Each run allows a few kinds of faults alone, so that many get far."""
        self.faults = faults
        ticket = HandoffTicket(
            HandoffId("h"), WorkerId("decode-0"), Incarnation("d"), 1, tuple(map(BlockId, range(num_blocks))), 0, LEASE_S
        )
        self.now = 0.0
        self.num_blocks = num_blocks
        self.fenced = fenced
        self.sender = sending.HandoffSender(RequestId("r"), ticket, LEASE_S, max_blocks_per_put=2)
        self.receiver = receiving.HandoffReceiver(RequestId("r"), ticket, num_blocks * 16, 0.0)
        self.to_decode: deque[object] = deque()
        self.to_prefill: deque[object] = deque()
        self.put: tuple[int, int] | None = None
        self.memory_intact = [False] * num_blocks
        self.window_open = True
        self.channel_up = True
        self.released = self.sender_told = self.prefilled = 0
        self.freed = self.delivered = self.receiver_told = 0
        self.sender_actions(self.sender.start())

    # -- carrying out actions -------------------------------------------------------------------------------------------

    def sender_actions(self, actions: list[sending.SenderAction]) -> None:
        for action in actions:
            match action:
                case sending.Send(message=message):
                    if self.channel_up:
                        self.to_decode.append(message)
                case sending.Put(first=first, count=count):
                    assert self.put is None, "one put at a time"
                    assert 0 <= first < first + count <= self.num_blocks
                    self.put = (first, count)
                case sending.ReleaseSource():
                    assert self.put is None, "released while a put reads"
                    self.released += 1
                case sending.Delivered() | sending.Failed():
                    self.sender_told += 1

    def receiver_actions(self, actions: list[receiving.ReceiverAction]) -> None:
        for action in actions:
            match action:
                case receiving.Send(message=message):
                    if self.channel_up:
                        self.to_prefill.append(message)
                case receiving.CloseWindow():
                    self.window_open = False
                case receiving.FreeBlocks():
                    self.freed += 1
                    assert self.put is None or self.fenced or not self.writer_may_write, "freed under a writer"
                case receiving.Deliver(first_token=token):
                    assert token == FIRST_TOKEN
                    assert all(self.memory_intact), "delivered with a block missing"
                    self.delivered += 1
                case receiving.Failed():
                    self.receiver_told += 1

    @property
    def writer_may_write(self) -> bool:
        return self.put is not None and not self.sender_dead

    sender_dead = False

    # -- what may happen ------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.prefilled == 0 and not self.sender_dead)
    @rule(count=st.integers(1, 6))
    def chunk_computed(self, count: int) -> None:
        self.sender_actions(self.sender.handle(sending.BlocksReady(count), self.now))

    @precondition(lambda self: self.prefilled == 0 and not self.sender_dead)
    @rule()
    def prefill_done(self) -> None:
        self.prefilled = 1
        self.sender_actions(self.sender.handle(sending.PrefillDone(self.num_blocks * 16, FIRST_TOKEN), self.now))

    @precondition(lambda self: self.put is not None and not self.sender_dead)
    @rule(data=st.data())
    def put_ends(self, data: st.DataObject) -> None:
        first, count = self.put or (0, 0)
        self.put = None
        if self.channel_up and (self.window_open or not self.fenced):
            corrupt = data.draw(st.sampled_from([None, None, None, *range(first, first + count)]))
            for number in range(first, first + count):
                self.memory_intact[number] = number != corrupt
            self.sender_actions(self.sender.handle(sending.PutDone(first, tuple(range(first, first + count))), self.now))
        else:
            self.sender_actions(self.sender.handle(sending.PutFailed("refused"), self.now))

    @rule()
    def messages_arrive(self) -> None:
        while self.to_decode or (self.to_prefill and not self.sender_dead):
            if self.to_decode:
                self.decode_receives()
            if self.to_prefill and not self.sender_dead:
                self.prefill_receives()

    @precondition(lambda self: bool(self.to_decode))
    @rule()
    def decode_receives(self) -> None:
        message = self.to_decode.popleft()
        if isinstance(message, HandoffOpen):
            if self.receiver.state is receiving.ReceiverState.RESERVED:
                self.receiver_actions(self.receiver.handle(receiving.Opened(self.fenced), self.now))
            elif self.receiver.state is not receiving.ReceiverState.OPEN and self.channel_up:  # there it is said twice
                self.to_prefill.append("refused")
            return
        if self.receiver.state is receiving.ReceiverState.RESERVED:
            return  # its HandoffOpen was refused: the shell drops what is not of an opened hand-off
        match message:
            case BlocksPlaced(first=first, checksums=checksums):
                intact = tuple(self.memory_intact[first : first + len(checksums)])
                event: object = receiving.Placed(first, intact)
            case HandoffComplete(num_blocks=num_blocks, num_tokens=num_tokens, first_token=token):
                event = receiving.Completed(num_blocks, num_tokens, token)
            case HandoffAbort(reason=reason):
                event = receiving.Aborted(reason)
            case _:
                raise AssertionError(message)
        self.receiver_actions(self.receiver.handle(event, self.now))

    @precondition(lambda self: bool(self.to_prefill) and not self.sender_dead)
    @rule()
    def prefill_receives(self) -> None:
        message = self.to_prefill.popleft()
        if self.sender.over and isinstance(message, HandoffCancel) and self.channel_up:
            self.to_decode.append(HandoffAbort(HandoffId("h"), "nothing is left"))  # the shell's answer
        match message:
            case HandoffOpened():
                event: object = sending.Opened()
            case "refused":
                event = sending.Refused("ended")
            case HandoffAck():
                event = sending.Acked()
            case HandoffMissing(blocks=blocks):
                event = sending.Missing(blocks)
            case HandoffCancel(reason=reason):
                event = sending.CancelledByPeer(reason)
            case _:
                raise AssertionError(message)
        self.sender_actions(self.sender.handle(event, self.now))

    @precondition(lambda self: "prefill cancels" in self.faults and not self.sender_dead)
    @rule()
    def prefill_cancels(self) -> None:
        self.sender_actions(self.sender.handle(sending.Cancelled("client left"), self.now))

    @precondition(lambda self: "decode cancels" in self.faults)
    @rule()
    def decode_cancels(self) -> None:
        self.receiver_actions(self.receiver.handle(receiving.Cancelled("client left"), self.now))

    @precondition(lambda self: "channel breaks" in self.faults and self.channel_up)
    @rule()
    def channel_breaks(self) -> None:
        self.channel_up = False
        self.to_decode.clear()
        self.to_prefill.clear()
        if not self.sender_dead:
            self.sender_actions(self.sender.handle(sending.ChannelLost("cut"), self.now))
        if self.receiver.state is not receiving.ReceiverState.RESERVED:
            self.receiver_actions(self.receiver.handle(receiving.ChannelLost("cut"), self.now))

    @precondition(lambda self: "prefill dies" in self.faults and not self.sender_dead)
    @rule()
    def prefill_worker_dies(self) -> None:
        self.sender_dead = True
        self.channel_up = False
        self.put = None
        self.to_prefill.clear()
        self.to_decode.clear()
        if self.receiver.state is not receiving.ReceiverState.RESERVED:
            self.receiver_actions(self.receiver.handle(receiving.WriterGone(), self.now))

    @precondition(lambda self: "a word is lost" in self.faults and bool(self.to_decode or self.to_prefill))
    @rule(to_decode=st.booleans())
    def a_word_is_lost(self, to_decode: bool) -> None:
        (self.to_decode if self.to_decode and (to_decode or not self.to_prefill) else self.to_prefill).popleft()

    @precondition(lambda self: "a word is said twice" in self.faults and bool(self.to_decode or self.to_prefill))
    @rule(to_decode=st.booleans())
    def a_word_is_said_twice(self, to_decode: bool) -> None:
        mailbox = self.to_decode if self.to_decode and (to_decode or not self.to_prefill) else self.to_prefill
        mailbox.appendleft(mailbox[0])

    @precondition(lambda self: "lease" in self.faults)
    @rule(seconds=st.floats(0.1, 40))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        if not self.sender_dead:
            self.sender_actions(self.sender.tick(self.now))
        self.receiver_actions(self.receiver.tick(self.now))

    # -- what must hold -------------------------------------------------------------------------------------------------

    @invariant()
    def ends_once(self) -> None:
        assert self.released <= 1
        assert self.sender_told <= 1
        assert self.freed + self.delivered <= 1
        assert self.receiver_told <= 1
        assert (self.freed + self.delivered == 1) == self.receiver.over
        assert self.sender_dead or (self.released == 1) == self.sender.over

    def teardown(self) -> None:
        """Whatever happened, time alone ends both sides: put, mailboxes, leases."""
        if not hasattr(self, "sender"):
            return
        for _ in range(40):
            if self.sender.over and self.receiver.over:
                break
            if self.put is not None and not self.sender_dead:
                self.put = None
                self.sender_actions(self.sender.handle(sending.PutFailed("end"), self.now))
            while self.to_decode:
                self.decode_receives()
            while self.to_prefill and not self.sender_dead:
                self.prefill_receives()
            self.time_passes(10.0)
        if self.receiver.state is receiving.ReceiverState.FENCING:
            # A writer that cannot be reached and is not known to be dead: only its death may free the blocks.
            assert not self.channel_up
            self.receiver_actions(self.receiver.handle(receiving.WriterGone(), self.now))
        assert self.receiver.over
        assert self.sender.over or self.sender_dead
        self.ends_once()


TestHandoffPair = HandoffPair.TestCase
TestHandoffPair.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
