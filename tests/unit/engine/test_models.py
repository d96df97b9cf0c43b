"""Every family against transformers: the same greedy tokens and the same probabilities, however the steps are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import VARIANTS, WINDOW, make_tiny_model

from engine.kv_pool import TORCH_DTYPES
from engine.model_config import load_model_config
from engine.model_runner import ModelRunner, load_runner
from engine.plan import SampleRequest, ScheduledSequence, StepPlan
from wire.ids import BlockId, RequestId
from wire.sequence import SampledToken, SamplingParams

VOCAB = 320
BLOCK = 8
NUM_BLOCKS = 48


@pytest.fixture(params=["auto", "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    """With the compiled kernels, where this machine has a compiler, and without."""
    return str(request.param)


@pytest.fixture(scope="module", params=VARIANTS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(request.param, tmp_path_factory.mktemp("models") / request.param, VOCAB)


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


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


def load(directory: Path, kernels: str, dtype: str = "float32") -> ModelRunner:
    layout = load_model_config(directory).kv_layout(BLOCK, dtype)
    pool = bytearray(b"\xff" * (NUM_BLOCKS * layout.block_bytes))  # NaN everywhere: nothing unwritten may be read
    return load_runner(
        directory, dtype=dtype, kv_memory=memoryview(pool), num_blocks=NUM_BLOCKS, block_size=BLOCK, kernels=kernels
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


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 45])
def test_prompt_and_decode_match_transformers(directory: Path, reference: Any, length: int, kernels: str) -> None:
    runner, sequence = load(directory, kernels), Sequence("a", prompt_of(length), 3)
    for number in range(12):
        step(runner, number, [(sequence, sequence.next_part())])
    check(reference, sequence)


def test_chunks_prefixes_and_mixed_batches_match_transformers(directory: Path, reference: Any, kernels: str) -> None:
    # 1. A long prompt goes in by chunks that end inside, at and behind block borders.
    runner = load(directory, kernels)
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
    for sequence in (long, short, late, twin):
        assert len(sequence.drawn) >= 4
        check(reference, sequence)


def test_bfloat16_stays_close_to_float32(directory: Path, kernels: str) -> None:
    exact, rounded = load(directory, kernels), load(directory, kernels, "bfloat16")
    assert rounded.layout.dtype == "bfloat16"
    drawn = []
    for runner in (exact, rounded):
        sequence = Sequence("a", prompt_of(33), 0)
        step(runner, 0, [(sequence, sequence.next_part(20))])
        step(runner, 1, [(sequence, sequence.next_part())])
        drawn.append(dict(sequence.drawn[0].top))
    best = max(drawn[0], key=lambda token: drawn[0][token])
    assert best in drawn[1]
    assert drawn[1][best] == pytest.approx(drawn[0][best], abs=0.35)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_generate_itself_gives_the_same_tokens(family: str, tmp_path: Path, kernels: str) -> None:
    directory = make_tiny_model(family, tmp_path, VOCAB, seed=5)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompt = prompt_of(3 * WINDOW)
    expected = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        do_sample=False,
        max_new_tokens=20,
        eos_token_id=None,
    )
    runner, sequence = load(directory, kernels), Sequence("a", prompt, 0)
    for number in range(20):
        step(runner, number, [(sequence, sequence.next_part())])
    assert sequence.tokens == expected[0].tolist()


def test_every_supported_dtype_has_a_torch_dtype() -> None:
    assert set(TORCH_DTYPES) == {"float32", "bfloat16", "float16"}
