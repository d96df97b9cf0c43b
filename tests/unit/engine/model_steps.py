"""Greedy sequences advanced by hand, step by step, and the model of transformers that they must agree with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model_config import load_model_config
from engine.model_runner import ModelRunner, load_runner
from engine.plan import SampleRequest, ScheduledSequence, StepPlan
from wire.ids import BlockId, RequestId
from wire.sequence import SampledToken, SamplingParams

VOCAB = 320
BLOCK = 8
NUM_BLOCKS = 48


class Sequence:
    """A greedy sequence, advanced by hand: the next tokens to compute, and what was drawn."""

    def __init__(self, name: str, prompt: list[int], first_block: int) -> None:
        self.name = RequestId(name)
        self.tokens = list(prompt)
        self.num_prompt = len(prompt)
        self.computed = 0
        self.blocks = tuple(BlockId(first_block + index) for index in range(12))
        self.drawn: list[SampledToken] = []

    def next_part(self, limit: int = 10_000) -> ScheduledSequence:
        part = tuple(self.tokens[self.computed : self.computed + limit])
        end = self.computed + len(part)
        request = None
        if end == len(self.tokens):
            request = SampleRequest(SamplingParams(seed=0, temperature=0.0, num_logprobs=5), position=end)
        return ScheduledSequence(self.name, part, self.computed, self.blocks, request)

    def took(self, part: ScheduledSequence, token: SampledToken | None) -> None:
        self.computed += len(part.token_ids)
        if token is not None:
            self.drawn.append(token)
            self.tokens.append(token.token_id)


def load(directory: Path, kernels: str, dtype: str = "float32", num_blocks: int = NUM_BLOCKS) -> ModelRunner:
    layout = load_model_config(directory).kv_layout(BLOCK, dtype)
    pool = bytearray(b"\xff" * (num_blocks * layout.block_bytes))  # NaN everywhere: nothing unwritten may be read
    return load_runner(
        directory, dtype=dtype, kv_memory=memoryview(pool), num_blocks=num_blocks, block_size=BLOCK, kernels=kernels
    )


def step(runner: ModelRunner, number: int, parts: list[tuple[Sequence, ScheduledSequence]]) -> None:
    result = runner.execute(StepPlan(number, tuple(part for _, part in parts)))
    assert set(result.sampled) == {part.request_id for _, part in parts if part.sample is not None}
    for sequence, part in parts:
        sequence.took(part, result.sampled.get(part.request_id))


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def check(reference: Any, sequence: Sequence) -> None:
    """Greedy tokens and log-probabilities, at every position behind the prompt, in one forward of the whole sequence."""
    with torch.inference_mode():
        logits = reference(torch.tensor([sequence.tokens])).logits[0].float()
    rows = logits[sequence.num_prompt - 1 : -1]
    assert rows.argmax(-1).tolist() == [token.token_id for token in sequence.drawn]
    table = torch.log_softmax(rows, dim=-1)
    for row, token in zip(table, sequence.drawn, strict=True):
        ids = [token_id for token_id, _ in token.top]
        assert len(ids) == 5
        torch.testing.assert_close(torch.tensor([p for _, p in token.top]), row[ids], rtol=1e-4, atol=1e-4)
        assert token.logprob == pytest.approx(float(row[token.token_id]), rel=1e-4, abs=1e-4)


def mixed_story(runner: ModelRunner) -> list[Sequence]:
    """Chunks, prompts and decode rows side by side, and a prefix that is cached; the sequences that came of it."""
    # 1. A long prompt goes in by chunks that end inside, at and behind block borders.
    long, short, late = (
        Sequence("long", prompt_of(61), 0),
        Sequence("short", prompt_of(5, 2), 12),
        Sequence("late", prompt_of(30, 3), 24),
    )
    for number, size in enumerate((3, 5, 8, 17)):
        step(runner, number, [(long, long.next_part(size))])
    # 2. A short prompt joins in the middle of it; then it decodes beside the chunks.
    step(runner, 4, [(long, long.next_part(4)), (short, short.next_part())])
    while long.computed < len(long.tokens) and not long.drawn:
        step(runner, 5, [(short, short.next_part()), (long, long.next_part(11))])
    # 3. Decode rows of unequal lengths, and another prompt's chunks between them.
    for number in range(9):
        step(runner, 6 + number, [(long, long.next_part()), (late, late.next_part(7)), (short, short.next_part())])
    # 4. A prefix that is in the pool already: a twin computes only what lies behind it, in blocks of its own.
    twin = Sequence("twin", long.tokens[:20] + prompt_of(9, 4), 36)
    twin.blocks = long.blocks[:2] + twin.blocks
    twin.computed = 2 * BLOCK
    for number in range(4):
        step(runner, 20 + number, [(twin, twin.next_part()), (late, late.next_part())])
    return [long, short, late, twin]
