"""One sequence inside the engine: its state, its tokens and its blocks.

    Add ─────▶ WAITING ◀──admit, preempt──▶ RUNNING ──lend──▶ EXPORTED ──release──▶ ENDED
                  ▲                            ▲
                  │ compute here (from both)   │ fill
    Reserve ─▶ QUEUED ────────grant───────▶ RESERVED                 every state ──end──▶ ENDED

WAITING and QUEUED hold no blocks. The others hold blocks for all of `tokens` but, at times, the last one drawn, whose
block the scheduler adds with the step that computes it.

        0          num_computed       num_prefill_tokens      len(tokens)
        ├── KV is in the blocks ──┼───── prefill, in chunks ─────┤
        ├── KV is in the blocks ─────────────────────────────────┼ decode: one token, the last drawn
"""

from __future__ import annotations

import enum
from collections import deque

from engine.grammar_state import GrammarState
from engine.messages import SequenceTimes
from engine.plan import SampleRequest, ScheduledSequence, ScoreRequest
from wire.block_hash import BlockHash, child_hash, root_hash
from wire.errors import InvalidTransition
from wire.ids import BlockId, RequestId
from wire.sequence import FinishReason, SampledToken, SequenceSpec, finish_reason_after

_HISTORY_LENGTH = 32  # moves kept for an error message
_NOTHING_BANNED: frozenset[int] = frozenset()


class SequenceState(enum.Enum):
    WAITING = "waiting"  # to be computed here
    QUEUED = "queued"  # a reservation that does not fit yet
    RUNNING = "running"
    RESERVED = "reserved"  # blocks lent to a writer
    EXPORTED = "exported"  # computed, blocks lent to a reader
    ENDED = "ended"


class SequenceEvent(enum.Enum):
    ADMIT = "admit"
    PREEMPT = "preempt"
    GRANT = "grant"
    FILL = "fill"
    COMPUTE_HERE = "compute-here"
    LEND = "lend"
    RELEASE = "release"
    END = "end"  # finished, failed or aborted


TRANSITIONS: dict[tuple[SequenceState, SequenceEvent], SequenceState] = {
    (SequenceState.WAITING, SequenceEvent.ADMIT): SequenceState.RUNNING,
    (SequenceState.WAITING, SequenceEvent.END): SequenceState.ENDED,
    (SequenceState.QUEUED, SequenceEvent.GRANT): SequenceState.RESERVED,
    (SequenceState.QUEUED, SequenceEvent.COMPUTE_HERE): SequenceState.WAITING,
    (SequenceState.QUEUED, SequenceEvent.END): SequenceState.ENDED,
    (SequenceState.RUNNING, SequenceEvent.PREEMPT): SequenceState.WAITING,
    (SequenceState.RUNNING, SequenceEvent.LEND): SequenceState.EXPORTED,
    (SequenceState.RUNNING, SequenceEvent.END): SequenceState.ENDED,
    (SequenceState.RESERVED, SequenceEvent.FILL): SequenceState.RUNNING,
    (SequenceState.RESERVED, SequenceEvent.COMPUTE_HERE): SequenceState.WAITING,
    (SequenceState.RESERVED, SequenceEvent.END): SequenceState.ENDED,
    (SequenceState.EXPORTED, SequenceEvent.RELEASE): SequenceState.ENDED,
    (SequenceState.EXPORTED, SequenceEvent.END): SequenceState.ENDED,
}


class Sequence:
    """Changed by the scheduler (state, blocks) and the core (tokens) alone. `now` is in seconds of the engine's clock."""

    __slots__ = (
        "_allowed",
        "_begun_at",
        "_end_token_ids",
        "_grammar",
        "_hashes",
        "_history",
        "_needs_history",
        "_num_prompt_tokens",
        "_queued_at",
        "_scored",
        "_times_due",
        "block_ids",
        "block_size",
        "export",
        "in_flight",
        "num_cached_tokens",
        "num_computed",
        "num_prefill_tokens",
        "num_published_blocks",
        "queue_key",
        "request_id",
        "scores_due",
        "spec",
        "state",
        "tokens",
    )

    def __init__(
        self, spec: SequenceSpec, block_size: int, state: SequenceState, now: float, *, export: bool = False
    ) -> None:
        self.spec = spec
        self.request_id: RequestId = spec.request_id
        self.export = export
        self.block_size = block_size
        self.state = state
        self.tokens: list[int] = list(spec.tokens)
        self.num_prefill_tokens = len(self.tokens)  # to be computed, or filled, before the next draw
        self.num_computed = 0
        self.num_cached_tokens = 0  # found in the prefix cache when the blocks were taken
        self.block_ids: tuple[BlockId, ...] = ()  # a tuple: handed out with every step, changed once per block
        self.num_published_blocks = 0  # the first ones, whose hashes are in the prefix cache
        self.in_flight = False  # part of a step that is being executed
        self.scores_due = spec.prompt_logprobs is not None  # the prompt's log-probabilities have not been handed out
        self._grammar: GrammarState | None = None
        self._allowed = b""  # for the next draw
        self._scored: list[SampledToken] = []  # the prompt's first tokens, as far as they are known
        self._hashes: list[BlockHash] = []  # of the full blocks, as far as anyone asked
        # Of the spec, what every step asks for.
        self._end_token_ids = spec.stop.end_token_ids
        self._needs_history = spec.sampling.needs_history
        self._num_prompt_tokens = len(spec.prompt)
        self._history = deque((state.value,), maxlen=_HISTORY_LENGTH)
        self._queued_at = now
        self.queue_key = now  # place in the scheduler's queue
        self._begun_at: float | None = None
        self._times_due = True

    # -- state ------------------------------------------------------------------------------------------------------

    def move(self, event: SequenceEvent) -> None:
        """The only way to change `state` (scheduler only: its queues follow the state).

        Raises:
            InvalidTransition: the state does not allow the event; the sequence is unchanged.
        """
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise InvalidTransition(f"sequence {self.request_id}", self.state.value, event.value, tuple(self._history))
        self.state = target
        self._history.append(f"{event.value}: {target.value}")

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.num_prefill_tokens

    @property
    def num_output_tokens(self) -> int:
        """Resumed ones included."""
        return len(self.tokens) - self._num_prompt_tokens

    # -- blocks -----------------------------------------------------------------------------------------------------

    def take_blocks(self, cached: tuple[BlockId, ...], fresh: tuple[BlockId, ...]) -> None:
        """Start on blocks for all tokens, the first of which hold their KV already."""
        self.block_ids = cached + fresh
        self.num_prefill_tokens = len(self.tokens)
        self.num_published_blocks = len(cached)
        self.num_computed = self.num_cached_tokens = len(cached) * self.block_size

    def give_blocks(self) -> tuple[BlockId, ...]:
        """The blocks, which the caller must release; nothing counts as computed any more."""
        blocks, self.block_ids = self.block_ids, ()
        self.num_computed = self.num_published_blocks = 0
        return blocks

    def blocks_covering(self, num_tokens: int) -> tuple[BlockId, ...]:
        return self.block_ids[: -(-num_tokens // self.block_size)]  # a tuple's whole slice is no copy

    def full_block_hashes(self, num_tokens: int) -> list[BlockHash]:
        """Chained hashes of the full blocks within the first `num_tokens` tokens."""
        size, num_full = self.block_size, num_tokens // self.block_size
        while len(self._hashes) < num_full:
            start = len(self._hashes) * size
            parent = self._hashes[-1] if self._hashes else root_hash(size, self.spec.cache_salt)
            self._hashes.append(child_hash(parent, self.tokens[start : start + size]))
        return self._hashes[:num_full]

    # -- steps ------------------------------------------------------------------------------------------------------

    def schedule(self, num_tokens: int, now: float) -> ScheduledSequence:
        """Its part of a step: the next `num_tokens` tokens, and a draw if they are the last ones known."""
        if self._begun_at is None:
            self._begun_at = now
        self.in_flight = True
        start, end = self.num_computed, self.num_computed + num_tokens
        return ScheduledSequence(
            self.request_id,
            (self.tokens[start],) if num_tokens == 1 else tuple(self.tokens[start:end]),
            start,
            self.blocks_covering(end),
            self._sample_request() if end == len(self.tokens) and not self.prompt_only else None,
            self._score_request(start, end) if self.scores_due else None,
        )

    @property
    def prompt_only(self) -> bool:
        return self.spec.stop.max_tokens == 0

    def add_scores(self, scored: tuple[SampledToken, ...]) -> None:
        self._scored.extend(scored)

    def take_scores(self) -> tuple[SampledToken, ...]:
        """The prompt's tokens with their log-probabilities, once, when all of them are computed; empty if nobody asked."""
        if not self.scores_due:
            return ()
        self.scores_due = False
        scored, self._scored = self._scored, []
        return (SampledToken(self.spec.prompt[0]), *scored)

    def append(self, token_id: int, max_model_len: int) -> FinishReason | None:
        """Take a drawn token; says whether, and why, it is the last one."""
        self.tokens.append(token_id)
        room = max_model_len - len(self.tokens)
        return finish_reason_after(self.spec.stop, self.num_output_tokens, token_id, room)

    def follow(self, grammar: GrammarState) -> None:
        """Draw only what `grammar`, which has read the output so far, allows.

        Raises:
            GrammarError: nothing is allowed.
        """
        self._grammar = grammar
        self._allow_next()

    def advance_grammar(self) -> None:
        """Behind `append`, if the token was not the last one.

        Raises:
            GrammarError: the grammar does not allow that token, or nothing behind it.
        """
        if self._grammar is not None:
            self._grammar.advance(self.tokens[-1])
            self._allow_next()

    def _allow_next(self) -> None:
        assert self._grammar is not None
        self._allowed = self._grammar.allowed(self._end_token_ids)

    def restart_clock(self, now: float) -> None:
        """Its wait for the first step begins now: the reservation ended."""
        self._queued_at, self._begun_at = now, None

    def take_times(self, now: float) -> SequenceTimes | None:
        """Times until the first token here, once; None afterwards. A sequence that ends without a step did so at once."""
        if not self._times_due:
            return None
        self._times_due = False
        begun_at = now if self._begun_at is None else self._begun_at
        return SequenceTimes(begun_at - self._queued_at, now - begun_at, self.num_cached_tokens)

    def _score_request(self, start: int, end: int) -> ScoreRequest | None:
        """Of the prompt tokens behind rows start..end-1, those that are not known yet (a preempted prompt begins again)."""
        prompt = self.spec.prompt
        first, last = max(start, len(self._scored)) + 1, min(end, len(prompt) - 1)
        if first > last:
            return None
        return ScoreRequest(self.spec.prompt_logprobs or 0, first - 1 - start, prompt[first : last + 1])

    def _sample_request(self) -> SampleRequest:
        spec, position = self.spec, len(self.tokens)
        too_short = position - self._num_prompt_tokens < spec.stop.min_tokens
        banned = self._end_token_ids if too_short else _NOTHING_BANNED
        if self._needs_history:
            output = tuple(self.tokens[self._num_prompt_tokens :])
            return SampleRequest(spec.sampling, position, banned, spec.prompt, output, self._allowed)
        return SampleRequest(spec.sampling, position, banned, allowed=self._allowed)
