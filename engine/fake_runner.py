"""A runner without a model: made-up arithmetic instead of attention, over a real KV pool, at a cost that the caller sets.

It serves simulations of clusters with known step costs, and tests of everything around the engine. Its output depends on the
content of every single position of the pool, as a model's does: a block that was lost, is stale, or belongs to another
sequence changes the tokens.

    K[p] = mix(K[p - 1] as read from the pool, token p, p)       8 bytes of uint64
    V[p] = mix(K[p])
    token n = (sum over p < n of mix(K[p], V[p], p), as read from the pool; n; the seed unless greedy)  mod vocabulary
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.grammar_state import GrammarFactory
from engine.plan import SampleRequest, ScheduledSequence, ScoreRequest, StepPlan, StepResult
from wire.ids import BlockId, RequestId
from wire.kv_layout import KvLayout
from wire.sequence import FinishReason, SampledToken, SamplingParams, SequenceSpec, StopRules, finish_reason_after

_U64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_CHAIN_START = 0x6B7672656C617921  # stands for K[-1]
_FORCING_BIAS = 50.0  # a logit bias from here on decides the draw; at minus that it bans
_NOTHING_BANNED: frozenset[int] = frozenset()


def fake_layout(block_size: int) -> KvLayout:
    """The only layout that the fake runner takes: one layer, one head, 8 bytes each of K and V per token."""
    return KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=block_size, dtype="uint8")


class FakeRunner:
    """
    Args:
        kv_memory: writable, at least `num_blocks * layout.block_bytes` bytes.
        step_s: cost of each step; `prefill_token_s` and `decode_token_s` come on top, for every token of rows of several
            tokens and of one token.
        sleep: takes seconds; called once per step that costs anything.

    Raises:
        ValueError: the layout is not `fake_layout`, or the memory is too small.
    """

    def __init__(
        self,
        layout: KvLayout,
        kv_memory: memoryview,
        num_blocks: int,
        vocab_size: int,
        max_model_len: int,
        step_s: float = 0.0,
        prefill_token_s: float = 0.0,
        decode_token_s: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if layout != fake_layout(layout.block_size):
            raise ValueError(f"layout: the fake runner takes {fake_layout(layout.block_size)}, not {layout}")
        nbytes = num_blocks * layout.block_bytes
        if kv_memory.nbytes < nbytes:
            raise ValueError(f"kv_memory: {num_blocks} blocks need {nbytes} bytes, not {kv_memory.nbytes}")
        self.layout = layout
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._step_s = step_s
        self._prefill_token_s = prefill_token_s
        self._decode_token_s = decode_token_s
        self._sleep = sleep
        # Two views of one memory: single words are fast as Python integers, whole sequences as arrays.
        self._words = kv_memory.cast("B")[:nbytes].cast("Q")
        self._pool: NDArray[np.uint64] = np.frombuffer(self._words, dtype=np.uint64).reshape(
            num_blocks, 2, layout.block_size
        )

    def warm_up(self) -> None:
        greedy = SampleRequest(SamplingParams(seed=0, temperature=0.0), position=1)
        sequence = ScheduledSequence(RequestId("warm-up"), (0,), 0, (BlockId(0),), greedy)
        self._write(sequence)
        self._read([sequence])

    def execute(self, plan: StepPlan) -> StepResult:
        for sequence in plan.sequences:
            self._write(sequence)
        drawing = [sequence for sequence in plan.sequences if sequence.sample is not None]
        sampled = {
            sequence.request_id: _draw(digest, sequence.sample, self.vocab_size)
            for sequence, digest in zip(drawing, self._read(drawing), strict=True)
            if sequence.sample is not None
        }
        cost_s = self._cost_s(plan)
        if cost_s > 0.0:
            self._sleep(cost_s)
        scored = {
            sequence.request_id: self._score(sequence, sequence.score)
            for sequence in plan.sequences
            if sequence.score is not None
        }
        return StepResult(plan.step, sampled, scored)

    def _score(self, sequence: ScheduledSequence, request: ScoreRequest) -> tuple[SampledToken, ...]:
        first = sequence.start + request.first_row
        return tuple(
            _scored(self._words[self._word(sequence, position)], token_id, request.num_logprobs, self.vocab_size)
            for position, token_id in enumerate(request.token_ids, first)
        )

    def close(self) -> None:
        """Let go of the memory, whose owner may then unmap it. The runner is of no use afterwards."""
        self._pool = np.zeros((0, 2, self.layout.block_size), dtype=np.uint64)
        self._words.release()

    def _cost_s(self, plan: StepPlan) -> float:
        num_decode_tokens = sum(len(sequence.token_ids) == 1 for sequence in plan.sequences)
        num_prefill_tokens = plan.num_tokens - num_decode_tokens
        return self._step_s + num_prefill_tokens * self._prefill_token_s + num_decode_tokens * self._decode_token_s

    def _write(self, sequence: ScheduledSequence) -> None:
        """K and V of the step's tokens, chained to what the pool holds in front of them."""
        start, words = sequence.start, self._words
        k = words[self._word(sequence, start - 1)] if start > 0 else _CHAIN_START
        for position, token_id in enumerate(sequence.token_ids, start):
            k = _next_k(k, token_id, position)
            word = self._word(sequence, position)
            words[word] = k
            words[word + self.layout.block_size] = _mix(k)

    def _word(self, sequence: ScheduledSequence, position: int) -> int:
        """Where K of a position lies, in words of 8 bytes; its V lies `block_size` words behind."""
        index, offset = divmod(position, self.layout.block_size)
        return sequence.block_ids[index] * 2 * self.layout.block_size + offset

    def _read(self, sequences: list[ScheduledSequence]) -> list[int]:
        """One digest per sequence over all its positions in the pool, the step's own included."""
        if not sequences:
            return []
        block_size = self.layout.block_size
        lengths = [sequence.start + len(sequence.token_ids) for sequence in sequences]
        num_blocks = [self.layout.blocks_for(length) for length in lengths]
        tables = (sequence.block_ids[:count] for sequence, count in zip(sequences, num_blocks, strict=True))
        blocks = self._pool[np.fromiter(chain.from_iterable(tables), dtype=np.intp)]  # [block, k/v, token]
        first_position = np.concatenate([np.arange(0, count * block_size, block_size) for count in num_blocks])
        positions = first_position[:, None] + np.arange(block_size)  # [block, token]
        digests = _digest_array(blocks[:, 0], blocks[:, 1], positions.astype(np.uint64))
        digests[positions >= np.repeat(lengths, num_blocks)[:, None]] = 0
        first_block = np.cumsum([0, *num_blocks[:-1]])
        totals: list[int] = np.add.reduceat(digests.sum(axis=1, dtype=np.uint64), first_block).tolist()
        return totals


@dataclass(frozen=True, slots=True)
class ReferenceOutput:
    tokens: tuple[SampledToken, ...]  # behind `spec.resumed`
    finish: FinishReason
    prompt: tuple[SampledToken, ...] = ()  # if `spec.prompt_logprobs` asks for it


def reference_output(
    spec: SequenceSpec, vocab_size: int, max_model_len: int, grammars: GrammarFactory | None = None
) -> ReferenceOutput:
    """What the fake runner must draw for `spec`, whatever blocks, batches, chunks and hand-offs it goes through.

    Args:
        grammars: needed for a spec with a grammar.
    """
    stop: StopRules = spec.stop
    tokens = list(spec.tokens)
    drawn: list[SampledToken] = []
    scored: list[SampledToken] = []
    if spec.prompt_logprobs is not None:
        scored.append(SampledToken(spec.prompt[0]))
        k = _CHAIN_START
        for position, (token_id, following) in enumerate(itertools.pairwise(spec.prompt)):
            k = _next_k(k, token_id, position)
            scored.append(_scored(k, following, spec.prompt_logprobs, vocab_size))
    if stop.max_tokens == 0:
        return ReferenceOutput((), FinishReason.LENGTH, tuple(scored))
    digest, k, num_digested = 0, _CHAIN_START, 0
    while True:
        for position in range(num_digested, len(tokens)):
            k = _next_k(k, tokens[position], position)
            digest = (digest + _digest(k, _mix(k), position)) & _U64
        num_digested = len(tokens)
        output = tokens[len(spec.prompt) :]
        history = spec.sampling.needs_history
        request = SampleRequest(
            params=spec.sampling,
            position=len(tokens),
            banned_token_ids=stop.end_token_ids if len(output) < stop.min_tokens else _NOTHING_BANNED,
            prompt=spec.prompt if history else (),
            output=tuple(output) if history else (),
        )
        if spec.grammar and grammars is not None:
            request = msgspec.structs.replace(
                request, allowed=grammars.start(spec.grammar, output).allowed(stop.end_token_ids)
            )
        drawn.append(_draw(digest, request, vocab_size))
        tokens.append(drawn[-1].token_id)
        finish = finish_reason_after(stop, len(output) + 1, tokens[-1], max_model_len - len(tokens))
        if finish is not None:
            return ReferenceOutput(tuple(drawn), finish, tuple(scored))


# -- arithmetic -----------------------------------------------------------------------------------------------------


def _mix(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    x = (x + _GOLDEN) & _U64
    x = ((x ^ (x >> 30)) * _MIX_1) & _U64
    x = ((x ^ (x >> 27)) * _MIX_2) & _U64
    return x ^ (x >> 31)


def _mix_array(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`_mix` of every element; uint64 arrays wrap."""
    x = x + np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


def _next_k(previous_k: int, token_id: int, position: int) -> int:
    return _mix((previous_k ^ (token_id * _GOLDEN) ^ (position * _MIX_1)) & _U64)


def _digest(k: int, v: int, position: int) -> int:
    return _mix((k ^ (v * _MIX_1) ^ (position * _MIX_2)) & _U64)


def _digest_array(k: NDArray[np.uint64], v: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`_digest` of every element."""
    return _mix_array(k ^ (v * np.uint64(_MIX_1)) ^ (positions * np.uint64(_MIX_2)))


def _scored(k: int, token_id: int, num_logprobs: int, vocab_size: int) -> SampledToken:
    """A made-up log-probability of `token_id` behind the position whose K is given."""
    logprob = -(_mix(k ^ token_id) % 1024 + 1) / 1024
    first = k % vocab_size
    top = tuple(((first + rank) % vocab_size, -(rank + 1) / 1024) for rank in range(min(num_logprobs, vocab_size)))
    return SampledToken(token_id, logprob, top)


def _draw(digest: int, request: SampleRequest, vocab_size: int) -> SampledToken:
    params = request.params
    seed = params.seed if params.temperature > 0.0 else 0
    noise = _mix((digest ^ (seed * _GOLDEN) ^ (request.position * _MIX_2)) & _U64)
    if params.needs_history:
        for token_id in chain(request.prompt, request.output):
            noise = _mix((noise ^ token_id) & _U64)
    order = _by_preference(noise, request, vocab_size)
    token_id = next(iter(order), noise % vocab_size)  # with every id banned, the ban has no meaning
    if params.num_logprobs is None:
        return SampledToken(token_id)
    logprob = -(noise % 1024 + 1) / 1024
    others = (other for other in _by_preference(noise, request, vocab_size) if other != token_id)
    best = [token_id, *(other for other, _ in zip(others, range(params.num_logprobs), strict=False))][: params.num_logprobs]
    return SampledToken(token_id, logprob, tuple((other, logprob - rank) for rank, other in enumerate(best)))


def _by_preference(noise: int, request: SampleRequest, vocab_size: int) -> Iterator[int]:
    """Token ids that may be drawn, best first: forced ones by their bias, then from the digest's own choice upward."""
    bias, banned, mask = request.params.logit_bias, request.banned_token_ids, request.allowed

    def allowed(token_ids: Iterable[int]) -> Iterator[int]:
        return (
            one
            for one in token_ids
            if one not in banned
            and bias.get(one, 0.0) > -_FORCING_BIAS
            and (not mask or (one >> 3 < len(mask) and mask[one >> 3] >> (one & 7) & 1))
        )

    forced = sorted(
        (one for one, value in bias.items() if value >= _FORCING_BIAS and 0 <= one < vocab_size),
        key=lambda one: (-bias[one], one),
    )
    yield from allowed(forced)
    yield from allowed((noise + step) % vocab_size for step in range(vocab_size))
