"""A `Generator` that says what a test tells it to, under the real stop rules, and counts what is held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from coordinator.generation import Generation, GenerationError, Placement, Policy, Timeline, Tokens
from wire.sequence import FinishReason, SampledToken, SequenceSpec, finish_reason_after

TokenSource = Callable[[SequenceSpec, int], int]  # (spec, output index) → token id


def biased_or_seeded(spec: SequenceSpec, index: int) -> int:
    """The most favoured token of `logit_bias`, or one that only depends on prompt, seed and index."""
    bias = spec.sampling.logit_bias
    if bias:
        return max(bias, key=lambda token_id: (bias[token_id], -token_id))
    return 100 + (sum(spec.prompt) * 31 + spec.sampling.seed * 17 + index * 7) % 150


def says(*ids: int) -> TokenSource:
    """These tokens, then the last one again and again."""
    return lambda spec, index: ids[min(index, len(ids) - 1)]


@dataclass
class ScriptedGenerator:
    source: TokenSource = biased_or_seeded
    tokens_per_item: int = 1
    logprob: Callable[[int], float] = lambda token_id: -0.25
    fail_at: int | None = None  # output index at which the generation fails
    failure: Exception = field(default_factory=lambda: GenerationError(502, "server_error", "worker_lost", "decode-0 died"))
    refuse: Callable[[SequenceSpec, int], Exception | None] = lambda spec, number: None  # number: of the submit call
    gate: Callable[[SequenceSpec, int], asyncio.Event | None] = lambda spec, index: None  # waited for before that token
    submit_gate: asyncio.Event | None = None
    pause_s: float = 0.0
    cached: Callable[[SequenceSpec], int] = lambda spec: 0
    placement: Placement | None = field(default_factory=lambda: Placement("always", "prefill-0", "decode-0"))
    is_ready: bool = True
    max_model_len: int | None = None
    model: str | None = "tiny"
    specs: list[SequenceSpec] = field(default_factory=list)
    policies: list[Policy | None] = field(default_factory=list)
    generations: list[ScriptedGeneration] = field(default_factory=list)

    def ready(self) -> bool:
        return self.is_ready

    async def submit(self, spec: SequenceSpec, policy: Policy | None) -> Generation:
        number = len(self.specs)
        self.specs.append(spec)
        self.policies.append(policy)
        if self.submit_gate is not None:
            await self.submit_gate.wait()
        refusal = self.refuse(spec, number)
        if refusal is not None:
            raise refusal
        generation = ScriptedGeneration(self, spec)
        self.generations.append(generation)
        return generation

    @property
    def num_live(self) -> int:
        """Accepted sequences that have neither ended nor been cancelled."""
        return sum(not generation.over for generation in self.generations)


class ScriptedGeneration:
    def __init__(self, script: ScriptedGenerator, spec: SequenceSpec) -> None:
        self._script = script
        self.spec = spec
        self.placement = script.placement
        self.timeline = Timeline(0.5, 1.0, None, 12.0, 2.0, None, 4.0, 18.0, 40.0)
        self.num_cached_tokens = script.cached(spec)
        self.num_produced = 0
        self.over = False
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = self.cancelled or not self.over
        self.over = True

    async def __aiter__(self) -> AsyncIterator[Tokens]:
        item: list[SampledToken] = []
        index = 0
        prompt = prompt_logprobs(self.spec)
        if self.spec.stop.max_tokens == 0:
            self.over = True
            yield Tokens((), FinishReason.LENGTH, prompt)
            return
        while not self.cancelled:
            event = self._script.gate(self.spec, index)
            if event is not None:
                await event.wait()
            await asyncio.sleep(self._script.pause_s)
            if self._script.fail_at == index:
                self.over = True
                raise self._script.failure
            token_id = self._script.source(self.spec, index)
            item.append(sampled(token_id, self.spec.sampling.num_logprobs, self._script.logprob(token_id)))
            index += 1
            self.num_produced = index
            finish = finish_reason_after(self.spec.stop, index, token_id, room=1 << 30)
            if finish is not None:
                self.over = True
            if finish is not None or len(item) == self._script.tokens_per_item:
                yield Tokens(tuple(item), finish, prompt)
                item, prompt = [], ()
            if finish is not None:
                return


def prompt_logprobs(spec: SequenceSpec) -> tuple[SampledToken, ...]:
    if spec.prompt_logprobs is None:
        return ()
    return (SampledToken(spec.prompt[0]), *(sampled(token_id, spec.prompt_logprobs) for token_id in spec.prompt[1:]))


def sampled(token_id: int, num_logprobs: int | None, logprob: float = -0.25) -> SampledToken:
    if num_logprobs is None:
        return SampledToken(token_id)
    best = [token_id, *range(33 + 30, 33 + 60)]
    return SampledToken(token_id, logprob, tuple((other, logprob - rank) for rank, other in enumerate(best[:num_logprobs])))
