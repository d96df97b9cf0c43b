"""The engine without its model: commands and step results in, plans and events out. Sans-IO; `now` is passed in.

    handle(command) ──┐
                      ▼
    plan ─▶ StepPlan ─▶ runner.execute ─▶ StepResult ─▶ apply      (or fail_step, if the runner raised)
                                                          │
                      ┌───────────────────────────────────┘
                      ▼
                 EngineEvents

At most one step is out at a time. Commands may come while it is: a sequence aborted then leaves at once, and its blocks
follow when the step is over.
"""

from __future__ import annotations

from engine.blocks import BlockPool
from engine.engine_config import EngineConfig
from engine.errors import StepMismatch
from engine.grammar_state import GrammarError, GrammarFactory
from engine.messages import (
    Abort,
    Add,
    BlocksComputed,
    ComputeHere,
    EngineCommand,
    EngineEvent,
    EngineStats,
    Fill,
    Rejected,
    Release,
    Reserve,
    Reserved,
    TokensSampled,
)
from engine.plan import StepPlan, StepResult
from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceState
from wire.kv_layout import KvLayout
from wire.sequence import FinishReason, SampledToken, SequenceSpec

_MAX_TOKEN_ID = 2**32 - 1  # what a block hash can hold; the vocabulary is checked where the request enters the cluster


class EngineCore:
    """One engine's scheduling state. Not thread-safe: one thread calls everything.

    Args:
        num_blocks: blocks in the pool, each of `layout.block_size` tokens.
        max_model_len: tokens that a sequence may have, output included.
        grammars: None: sequences with a grammar are rejected.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: KvLayout,
        num_blocks: int,
        max_model_len: int,
        grammars: GrammarFactory | None = None,
    ) -> None:
        self._grammars = grammars
        self._layout = layout
        self._max_model_len = max_model_len
        self._pool = BlockPool(num_blocks)
        self._scheduler = Scheduler(config, layout, self._pool)
        self._step = 0
        self._in_flight: list[Sequence] = []  # those of the step that is out, in the order of its plan
        self._num_prefill_tokens = 0
        self._num_decode_tokens = 0

    # -- commands ---------------------------------------------------------------------------------------------------

    def handle(self, command: EngineCommand, now: float) -> list[EngineEvent]:
        """
        Raises:
            InvalidTransition: the sequence's state does not allow the command (a `Fill` of what was not reserved, say):
                a bug of the caller. Nothing has changed.
        """
        match command:
            case Add(spec, export):
                events = self._add(spec, SequenceState.WAITING, now, export=export)
            case Reserve(spec):
                events = self._add(spec, SequenceState.QUEUED, now)
            case _:
                events = []
                sequence = self._scheduler.find(command.request_id)
                if sequence is not None:  # else it has ended meanwhile
                    events = self._change(sequence, command, now)
        return events + self._grant()

    def _add(self, spec: SequenceSpec, state: SequenceState, now: float, *, export: bool = False) -> list[EngineEvent]:
        refusal = self._refusal(spec, export, decodes=state is SequenceState.QUEUED)
        if refusal is not None:
            return [Rejected(spec.request_id, refusal, invalid=True)]
        sequence = Sequence(spec, self._layout.block_size, state, now, export=export)
        if spec.grammar:
            if self._grammars is None:
                return [Rejected(spec.request_id, "grammar: this model's tokenizer cannot be constrained", invalid=True)]
            try:
                sequence.follow(self._grammars.start(spec.grammar, spec.resumed))
            except GrammarError as error:
                return [Rejected(spec.request_id, str(error), invalid=True)]
        self._scheduler.add(sequence)
        return []

    def _change(self, sequence: Sequence, command: Fill | ComputeHere | Release | Abort, now: float) -> list[EngineEvent]:
        match command:
            case Fill(_, first_token):
                return self._fill(sequence, first_token, now)
            case ComputeHere():
                self._scheduler.compute_here(sequence)
                sequence.restart_clock(now)
            case Release():
                self._scheduler.release(sequence)
            case Abort():
                self._scheduler.end(sequence)
        return []

    def _fill(self, sequence: Sequence, first_token: SampledToken, now: float) -> list[EngineEvent]:
        self._scheduler.fill(sequence)
        sequence.scores_due = False  # whoever computed the prompt has sent them
        if not 0 <= first_token.token_id <= _MAX_TOKEN_ID:
            self._scheduler.end(sequence)
            return [Rejected(sequence.request_id, f"first_token: {first_token.token_id} is no token id", invalid=False)]
        sequence.restart_clock(now)
        finish = sequence.append(first_token.token_id, self._max_model_len)
        if finish is None:
            return self._advance_grammar(sequence)
        self._scheduler.end(sequence)
        return [TokensSampled(sequence.request_id, sequence.num_output_tokens, (), finish, sequence.take_times(now))]

    def _refusal(self, spec: SequenceSpec, export: bool, decodes: bool) -> str | None:
        """Why this sequence can never run here."""
        if self._scheduler.find(spec.request_id) is not None:
            return f"request_id: {spec.request_id!r} is already in the engine"
        tokens = spec.tokens
        if not tokens:
            return "prompt: it must have at least one token"
        if min(tokens) < 0 or max(tokens) > _MAX_TOKEN_ID:
            return f"prompt: token ids lie between 0 and {_MAX_TOKEN_ID}"
        if spec.grammar and spec.stop.min_tokens:
            return "min_tokens: a grammar alone says where the output may end"
        prompt_only = spec.stop.max_tokens == 0 and not spec.resumed and not decodes
        if len(tokens) + (not prompt_only) > self._max_model_len:
            return f"prompt: {len(tokens)} tokens leave no room for another in a context of {self._max_model_len}"
        remaining = spec.stop.max_tokens - len(spec.resumed)
        if remaining < 1 and not prompt_only:
            return f"max_tokens: {spec.stop.max_tokens} leaves nothing to generate behind {len(spec.resumed)} output tokens"
        longest = len(tokens) if export else min(len(tokens) + remaining, self._max_model_len)
        needed = self._layout.blocks_for(longest)
        if needed > self._pool.num_blocks:
            return f"max_tokens: {longest} tokens need {needed} blocks, more than the {self._pool.num_blocks} of the KV pool"
        return None

    # -- steps ------------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, which must be given back to `apply` or `fail_step`. None: nothing can run until a command comes.

        Raises:
            StepMismatch: the last step is still out.
        """
        if self._in_flight:
            raise StepMismatch(f"step {self._step} is still out")
        planned = self._scheduler.plan()
        if not planned:
            return None
        self._step += 1
        self._in_flight = [sequence for sequence, _ in planned]
        return StepPlan(self._step, tuple(sequence.schedule(num_tokens, now) for sequence, num_tokens in planned))

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> list[EngineEvent]:
        """Take what the runner computed.

        Raises:
            StepMismatch: `plan` or `result` is not of the step that is out, or a drawn token is missing.
        """
        if result.step != plan.step:
            raise StepMismatch(f"a result of step {result.step} for step {plan.step}")
        for scheduled in plan.sequences:
            if scheduled.sample is not None and scheduled.request_id not in result.sampled:
                raise StepMismatch(f"step {plan.step} drew no token for {scheduled.request_id}")
            if scheduled.score is not None and scheduled.request_id not in result.scored:
                raise StepMismatch(f"step {plan.step} scored nothing of {scheduled.request_id}")
        events: list[EngineEvent] = []
        for sequence, scheduled in zip(self._end_step(plan), plan.sequences, strict=True):
            num_tokens = len(scheduled.token_ids)
            if scheduled.start < sequence.num_prefill_tokens:
                self._num_prefill_tokens += num_tokens
            else:
                self._num_decode_tokens += 1
            if sequence.state is SequenceState.ENDED:
                continue  # aborted while the step was out
            num_computed = scheduled.start + num_tokens
            self._scheduler.computed(sequence, num_computed)
            if sequence.export:
                events.append(BlocksComputed(sequence.request_id, num_computed, scheduled.block_ids))
            if scheduled.score is not None:
                sequence.add_scores(result.scored[sequence.request_id])
            if scheduled.sample is not None:
                events += self._draw(sequence, result.sampled[sequence.request_id], now)
            elif sequence.prompt_only and not sequence.is_prefilling:
                events.append(self._over(sequence, 0, (), FinishReason.LENGTH, now))
        return events + self._grant()

    def fail_step(self, plan: StepPlan, error: BaseException, now: float) -> list[EngineEvent]:
        """The runner raised: its sequences end, and what they held is free again.

        Raises:
            StepMismatch: `plan` is not the step that is out.
        """
        reason = f"step {plan.step} failed: {type(error).__name__}: {error}"
        events: list[EngineEvent] = []
        for sequence in self._end_step(plan):
            if sequence.state is not SequenceState.ENDED:
                self._scheduler.end(sequence)
                events.append(Rejected(sequence.request_id, reason, invalid=False))
        return events + self._grant()

    def _end_step(self, plan: StepPlan) -> list[Sequence]:
        if not self._in_flight or plan.step != self._step:
            raise StepMismatch(f"step {plan.step} is not out; the last one was {self._step}")
        sequences, self._in_flight = self._in_flight, []
        for sequence in sequences:
            sequence.in_flight = False
        self._scheduler.step_over()
        return sequences

    def _draw(self, sequence: Sequence, token: SampledToken, now: float) -> list[EngineEvent]:
        first_index = sequence.num_output_tokens
        finish = sequence.append(token.token_id, self._max_model_len)
        over = self._over(sequence, first_index, (token,), finish, now)
        return [over] if finish is not None or sequence.export else [over, *self._advance_grammar(sequence)]

    def _advance_grammar(self, sequence: Sequence) -> list[EngineEvent]:
        """Behind a token that was not the last: a sequence that cannot go on under its grammar ends here."""
        try:
            sequence.advance_grammar()
        except GrammarError as error:
            self._scheduler.end(sequence)
            return [Rejected(sequence.request_id, str(error), invalid=False)]
        return []

    def _over(
        self, sequence: Sequence, first_index: int, tokens: tuple[SampledToken, ...], finish: FinishReason | None, now: float
    ) -> TokensSampled:
        """Its part of the step is over: what came of it, and what becomes of the sequence."""
        if sequence.export:
            self._scheduler.lend(sequence)
        elif finish is not None:
            self._scheduler.end(sequence)
        return TokensSampled(
            sequence.request_id, first_index, tokens, finish, sequence.take_times(now), sequence.take_scores()
        )

    def _grant(self) -> list[EngineEvent]:
        return [
            Reserved(sequence.request_id, sequence.block_ids, sequence.num_cached_tokens)
            for sequence in self._scheduler.grant()
        ]

    # -- state ------------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        scheduler, pool = self._scheduler, self._pool
        return EngineStats(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            reserved=len(scheduler.reserved),
            exporting=len(scheduler.exported),
            waiting_tokens=scheduler.num_waiting_tokens,
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_free,
            blocks_cached=pool.num_cached,
            blocks_held=pool.num_held,
            steps=self._step,
            preemptions=scheduler.num_preemptions,
            prefill_tokens=self._num_prefill_tokens,
            decode_tokens=self._num_decode_tokens,
            cached_prompt_tokens=scheduler.num_cached_tokens,
        )

    def check_conservation(self) -> None:
        """
        Raises:
            ConservationError: free + cached + held is not the whole pool, or a block is held for nobody.
        """
        self._scheduler.check_conservation()
