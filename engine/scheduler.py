"""Which sequences compute how many tokens in the next step, and who gets blocks.

One step is filled in this order, within `max_batched_tokens`:

    1. a token for every sequence that decodes     (prefill never starves decode)
    2. chunks of prompts that have begun           (in the order of admission)
    3. chunks of waiting ones, admitted now        (in the order of arrival, moved by priority)

Admission takes blocks for all tokens that a sequence has; only decode asks for more, one block at a time. When there is
none, the sequence that was admitted last gives up its blocks and is computed again later (preemption by recompute).

Reservations wait in the same queue as sequences to be computed: nobody overtakes one that does not fit. But a reservation
needs no step, so it need not wait for those ahead to be admitted: it is granted as soon as it fits beside all of them.

Source: vLLM V1's scheduler (tokens per sequence, no prefill or decode mode; preemption by recompute of the last admitted),
vLLM V0's block manager for the watermark.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from engine.blocks import BlockPool
from engine.engine_config import EngineConfig
from engine.sequence import Sequence, SequenceEvent, SequenceState
from wire.ids import BlockId, RequestId
from wire.kv_layout import KvLayout

_SCORED_CHUNK = 256  # tokens of a prompt whose log-probabilities are wanted: each needs a row of logits
_WATERMARK_DIVISOR = 100  # admission leaves one block in a hundred for the growth of those that run


class Scheduler:
    """Owns all sequences and the pool's books. No I/O, no time: `plan` may be called at any moment when no step is out."""

    def __init__(self, config: EngineConfig, layout: KvLayout, pool: BlockPool) -> None:
        self._config = config
        self._layout = layout
        self._pool = pool
        self._watermark = max(1, pool.num_blocks // _WATERMARK_DIVISOR)
        self._sequences: dict[RequestId, Sequence] = {}
        self.waiting: OrderedDict[RequestId, Sequence] = OrderedDict()  # WAITING and QUEUED
        self.running: OrderedDict[RequestId, Sequence] = OrderedDict()  # in the order of admission
        self.reserved: OrderedDict[RequestId, Sequence] = OrderedDict()
        self.exported: OrderedDict[RequestId, Sequence] = OrderedDict()
        self._queues = {
            SequenceState.WAITING: self.waiting,
            SequenceState.QUEUED: self.waiting,
            SequenceState.RUNNING: self.running,
            SequenceState.RESERVED: self.reserved,
            SequenceState.EXPORTED: self.exported,
        }
        self._orphans: list[tuple[BlockId, ...]] = []  # blocks of sequences that ended while a step writes into them
        self.num_preemptions = 0
        self.num_cached_tokens = 0

    def find(self, request_id: RequestId) -> Sequence | None:
        return self._sequences.get(request_id)

    def add(self, sequence: Sequence) -> None:
        """Take a new sequence, WAITING or QUEUED, into the queue.

        Its place follows from when it came and its priority, each step of which stands for some seconds of waiting. So
        whoever waits gains on all that come later, and no priority can starve another. Those that came back to the front
        stay there.
        """
        sequence.queue_key += sequence.spec.priority * self._config.priority_s
        self._sequences[sequence.request_id] = sequence
        behind: list[RequestId] = []
        for other in reversed(self.waiting.values()):
            if other.queue_key <= sequence.queue_key:
                break
            behind.append(other.request_id)
        self.waiting[sequence.request_id] = sequence
        for request_id in reversed(behind):
            self.waiting.move_to_end(request_id)

    # -- moves ------------------------------------------------------------------------------------------------------

    def fill(self, sequence: Sequence) -> None:
        """The blocks of a reservation hold the KV of all its tokens now."""
        self._move(sequence, SequenceEvent.FILL)
        self.computed(sequence, len(sequence.tokens))

    def compute_here(self, sequence: Sequence) -> None:
        """Give up a reservation; the sequence goes to the front of the queue."""
        self._move(sequence, SequenceEvent.COMPUTE_HERE)
        self._pool.release(sequence.give_blocks())

    def lend(self, sequence: Sequence) -> None:
        """Nothing more runs; the blocks stay held until `end`."""
        self._move(sequence, SequenceEvent.LEND)

    def release(self, sequence: Sequence) -> None:
        """End a sequence whose blocks were lent."""
        self._move(sequence, SequenceEvent.RELEASE)
        self._forget(sequence)

    def end(self, sequence: Sequence) -> None:
        """End a sequence in any state and take its blocks back; those that a step is writing into, once the step is over."""
        self._move(sequence, SequenceEvent.END)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        if sequence.in_flight:
            self._orphans.append(sequence.give_blocks())
        else:
            self._pool.release(sequence.give_blocks())

    def step_over(self) -> None:
        """No step writes into any block any more."""
        for blocks in self._orphans:
            self._pool.release(blocks)
        self._orphans.clear()

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        """The KV of the first `num_tokens` tokens is in memory: blocks that became full can be found from now on."""
        sequence.num_computed = num_tokens
        num_full = num_tokens // self._layout.block_size
        if num_full > sequence.num_published_blocks and self._config.prefix_cache:
            hashes = sequence.full_block_hashes(num_tokens)
            for index in range(sequence.num_published_blocks, num_full):
                self._pool.publish(sequence.block_ids[index], hashes[index])
            sequence.num_published_blocks = num_full

    # -- decisions --------------------------------------------------------------------------------------------------

    def plan(self) -> list[tuple[Sequence, int]]:
        """The next step: sequences and how many tokens of each. Empty if nothing can run; then only a command, never time,
        can change that."""
        step: list[tuple[Sequence, int]] = []
        prefilling: list[Sequence] = []
        for sequence in list(self.running.values()):
            if sequence.state is not SequenceState.RUNNING:
                continue  # preempted for one before it
            if sequence.is_prefilling:
                prefilling.append(sequence)
            elif self._grow(sequence):
                step.append((sequence, 1))
        budget = self._config.max_batched_tokens - len(step)
        for sequence in self._prefill_order(prefilling):
            if budget == 0:
                break
            if sequence.state is SequenceState.WAITING and not self._admit(sequence):
                break
            remaining = sequence.num_prefill_tokens - sequence.num_computed
            num_tokens = min(remaining, self._config.prefill_chunk, budget)
            if sequence.scores_due:
                num_tokens = min(num_tokens, _SCORED_CHUNK)
            budget -= num_tokens
            step.append((sequence, num_tokens))
        return step

    def grant(self) -> list[Sequence]:
        """Reservations that fit now beside everyone ahead of them; they hold their blocks when this returns."""
        granted: list[Sequence] = []
        blocks_ahead = sequences_ahead = 0
        for sequence in self.waiting.values():
            if self._num_active + sequences_ahead + len(granted) >= self._config.max_active_sequences:
                break
            if sequence.state is SequenceState.QUEUED:
                if not self._take_blocks(sequence, blocks_ahead):
                    break
                granted.append(sequence)
            else:
                blocks_ahead += self._layout.blocks_for(len(sequence.tokens))
                sequences_ahead += 1
        for sequence in granted:
            self._move(sequence, SequenceEvent.GRANT)
        return granted

    def check_conservation(self) -> None:
        """
        Raises:
            ConservationError: a block is lost, or held for nobody.
        """
        self._pool.check_conservation([*(sequence.block_ids for sequence in self._sequences.values()), *self._orphans])

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens to be computed before the next draw, of sequences that wait or have begun; reservations compute nothing."""
        waiting = sum(len(one.tokens) for one in self.waiting.values() if one.state is SequenceState.WAITING)
        return waiting + sum(one.num_prefill_tokens - one.num_computed for one in self.running.values() if one.is_prefilling)

    # -- details ----------------------------------------------------------------------------------------------------

    @property
    def _num_active(self) -> int:
        return len(self.running) + len(self.reserved)

    def _prefill_order(self, prefilling: list[Sequence]) -> Iterator[Sequence]:
        """Begun prompts that were not preempted, then the waiting ones up to the first reservation."""
        for sequence in prefilling:
            if sequence.state is SequenceState.RUNNING:
                yield sequence
        while self.waiting and self._num_active < self._config.max_active_sequences:
            first = next(iter(self.waiting.values()))
            if first.state is SequenceState.QUEUED:
                return  # it does not fit, else it had been granted
            yield first

    def _admit(self, sequence: Sequence) -> bool:
        if not self._take_blocks(sequence, 0):
            return False
        self._move(sequence, SequenceEvent.ADMIT)
        return True

    def _take_blocks(self, sequence: Sequence, blocks_ahead: int) -> bool:
        """Blocks for all tokens, cached ones first, unless fewer than `blocks_ahead` would then be left for others."""
        tokens = len(sequence.tokens)
        # A sequence that computes must compute its last token, since the draw needs its logits.
        findable = tokens if sequence.state is SequenceState.QUEUED else 0 if sequence.scores_due else tokens - 1
        cached: tuple[BlockId, ...] = ()
        if self._config.prefix_cache:
            cached = self._pool.find(sequence.full_block_hashes(findable))
        num_fresh = self._layout.blocks_for(tokens) - len(cached)
        # Without anyone who may grow, the watermark would only keep out a sequence that needs the whole pool.
        spare = blocks_ahead + (self._watermark if self._num_active else 0)
        if num_fresh + spare > self._pool.num_available_without(cached):
            return False
        self._pool.hold(cached)
        sequence.take_blocks(cached, self._pool.allocate(num_fresh))
        self.num_cached_tokens += sequence.num_cached_tokens
        return True

    def _grow(self, sequence: Sequence) -> bool:
        """Make sure that the next token has a block, whoever must be preempted for it; False if `sequence` itself was."""
        if len(sequence.tokens) <= len(sequence.block_ids) * self._layout.block_size:
            return True
        while self._pool.num_available == 0:
            victim = next(last for last in reversed(self.running.values()) if not last.export)
            self._move(victim, SequenceEvent.PREEMPT)
            self._pool.release(victim.give_blocks())
            self.num_preemptions += 1
            if victim is sequence:
                return False
        sequence.block_ids += self._pool.allocate(1)
        return True

    def _move(self, sequence: Sequence, event: SequenceEvent) -> None:
        """Change the state, and with it the queue. Whoever comes back to the queue goes to its front."""
        left = self._queues[sequence.state]
        sequence.move(event)
        del left[sequence.request_id]
        entered = self._queues.get(sequence.state)
        if entered is not None:
            entered[sequence.request_id] = sequence
            if sequence.state is SequenceState.WAITING:
                sequence.queue_key = float("-inf")
                entered.move_to_end(sequence.request_id, last=False)
