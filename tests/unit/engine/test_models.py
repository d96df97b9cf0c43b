"""Every family against transformers: the same greedy tokens and the same probabilities, however the steps are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_steps import BLOCK, VOCAB, Sequence, check, load, mixed_story, prompt_of, step
from tiny_models import VARIANTS, WINDOW, make_tiny_model

from engine.kv_pool import TORCH_DTYPES


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


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 45])
def test_prompt_and_decode_match_transformers(directory: Path, reference: Any, length: int, kernels: str) -> None:
    runner, sequence = load(directory, kernels), Sequence("a", prompt_of(length), 3)
    for number in range(12):
        step(runner, number, [(sequence, sequence.next_part())])
    check(reference, sequence)


def test_chunks_prefixes_and_mixed_batches_match_transformers(directory: Path, reference: Any, kernels: str) -> None:
    for sequence in mixed_story(load(directory, kernels)):
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
