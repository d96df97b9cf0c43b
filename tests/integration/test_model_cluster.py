"""P and D as processes, with a real model: token for token what one process gives, and what transformers' `generate` gives.

Tiny models in every run; the default model, over a few hundred prompts, in CI (`slow`).
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from cluster_harness import Cluster, running_cluster
from tiny_models import make_tiny_model
from transformers_oracle import Oracle

from cluster.model_store import ModelStore, cache_directory
from cluster.model_tools import SubprocessTools
from coordinator.generation import Policy
from coordinator.text_model import TextModel
from engine.kv_packing import packed_bytes
from engine.model_config import load_model_config
from wire.sequence import SamplingParams

TRANSPORTS = ("zmq", "zmq-ipc", "shm")


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    expected: list[int]


async def same_alone_and_together(cluster: Cluster, cases: Sequence[Case], at_once: int) -> None:
    """Prompts one at a time, then `at_once` at a time (whose prefixes are now cached on both sides)."""
    for case in cases:
        assert await cluster.generate(case.prompt, max_tokens=len(case.expected)) == case.expected, len(case.prompt)
    await same_together(cluster, cases, at_once)


async def same_together(cluster: Cluster, cases: Sequence[Case], at_once: int) -> None:
    for start in range(0, len(cases), at_once):
        batch = cases[start : start + at_once]
        outputs = await asyncio.gather(*(cluster.generate(case.prompt, max_tokens=len(case.expected)) for case in batch))
        for case, output in zip(batch, outputs, strict=True):
            assert output == case.expected, len(case.prompt)


# -- tiny models --------------------------------------------------------------------------------------------------------

TINY_BLOCK = 16
TINY_CHUNK = 48
TINY = {
    "KVRELAY_DTYPE": "float32",
    "KVRELAY_BLOCK_SIZE": str(TINY_BLOCK),
    "KVRELAY_PREFILL_CHUNK": str(TINY_CHUNK),
    "KVRELAY_NUM_BLOCKS": "400",
}


def tiny_cases(oracle: Oracle) -> list[Case]:
    rng = random.Random(3)
    lengths = [1, 2, TINY_BLOCK - 1, TINY_BLOCK, TINY_BLOCK + 1, 2 * TINY_BLOCK, TINY_CHUNK - 1, TINY_CHUNK, TINY_CHUNK + 1]
    lengths += [3 * TINY_CHUNK, 200, *(rng.randrange(1, 220) for _ in range(9))]
    prompts = [[rng.randrange(3, 320) for _ in range(length)] for length in lengths]
    return [Case(prompt, oracle.greedy(prompt, 12)) for prompt in prompts]


@pytest.mark.parametrize(
    ("family", "transport"), [("llama", "zmq"), ("llama", "zmq-ipc"), ("llama", "shm"), ("gemma2", "shm"), ("gpt2", "zmq")]
)
async def test_tiny_model_through_p_and_d_equals_generate(tmp_path: Path, family: str, transport: str) -> None:
    model_dir = make_tiny_model(family, tmp_path / "model")
    cases = tiny_cases(Oracle(model_dir))
    async with running_cluster(model_dir, tmp_path / "logs", transport=transport, environ=TINY) as cluster:
        await same_alone_and_together(cluster, cases, at_once=10)
        seeded = SamplingParams(seed=77, temperature=1.0, top_p=0.95)
        for case in cases[-3:]:
            handed_off = await cluster.generate(case.prompt, max_tokens=20, sampling=seeded)
            assert handed_off == await cluster.generate(case.prompt, max_tokens=20, sampling=seeded, policy="never")
        await cluster.assert_empty()
        load = cluster.load("decode-0")
        assert load.handoffs == 2 * len(cases) + 3
        await cluster.generate([5] * 30, max_tokens=2)
        assert cluster.load("decode-0").prefill_tokens == load.prefill_tokens, "a hand-off computes no prompt token on D"


@pytest.mark.parametrize(("packing", "near"), [("int8", 0.2), ("fp8", 0.8)])
async def test_kv_that_travels_packed(tmp_path: Path, packing: str, near: float) -> None:
    """1. Outputs are forced, so that log-probabilities can be compared token by token. 2. Prompts run packed, and in one
    process. 3. Fewer bytes travelled, and D computed no prompt token. 4. What D draws from is nearly what it would be."""
    model_dir = make_tiny_model("llama", tmp_path / "model")
    rng = random.Random(8)
    prompts = [[rng.randrange(3, 320) for _ in range(length)] for length in (1, TINY_BLOCK, 3 * TINY_CHUNK + 5, 200)]
    forced = SamplingParams(seed=0, temperature=0.0, logit_bias={7: 100.0}, num_logprobs=1)
    environ = TINY | {"KVRELAY_PREFILL_KV_WIRE_DTYPE": packing}

    async with running_cluster(model_dir, tmp_path / "logs", transport="shm", environ=environ) as cluster:

        async def logprobs(prompt: list[int], policy: Policy) -> torch.Tensor:
            # The salt: what came packed is in D's prefix cache as well.
            generation = await cluster.submit(prompt, max_tokens=12, sampling=forced, policy=policy, cache_salt=policy)
            return torch.tensor([token.logprob for token in [t async for batch in generation for t in batch.tokens]])

        packed = [await logprobs(prompt, "always") for prompt in prompts]
        await cluster.assert_empty()
        load = cluster.load("decode-0")
        native = [await logprobs(prompt, "never") for prompt in prompts]
        await cluster.assert_empty()
    assert (load.prefill_tokens, load.handoffs, load.handoff_failures) == (0, len(prompts), 0)
    layout = load_model_config(model_dir).kv_layout(TINY_BLOCK, "float32")
    assert load.handoff_bytes == sum(layout.blocks_for(len(prompt)) for prompt in prompts) * packed_bytes(layout)
    for number, (ours, exact) in enumerate(zip(packed, native, strict=True)):
        assert abs(ours[0] - exact[0]) < 1e-4, "P drew it, from its own KV"
        assert (ours - exact).abs().max() < near
        assert (ours[1:] - exact[1:]).abs().max() > 0, "or it did not travel packed"
        assert (ours - native[number - 1]).abs().max() > near, "or any KV would do"


# -- the default model --------------------------------------------------------------------------------------------------

BLOCK, CHUNK = 64, 512
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def default_model() -> Path:
    store = ModelStore(cache_directory(os.environ), SubprocessTools(os.environ))
    return store.resolve("smollm2-135m", lambda what, share: None).directory


@pytest.fixture(scope="module")
def default_prompts(default_model: Path) -> list[list[int]]:
    """At least 200 prompts of real text, with every border among their lengths."""
    text = "\n".join(path.read_text() for path in sorted((Path(__file__).parents[2] / "wire").glob("*.py")))
    tokens = TextModel.load(default_model).tokenizer.encode(text, add_special_tokens=False)
    rng = random.Random(11)
    lengths = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, CHUNK - 1, CHUNK, CHUNK + 1, 1000]
    lengths += [int(rng.paretovariate(0.7)) * 8 % 400 + 1 for _ in range(200 - len(lengths))]
    starts = [rng.randrange(len(tokens) - 1001) for _ in lengths]
    return [list(tokens[start : start + length]) for start, length in zip(starts, lengths, strict=True)]


@pytest.fixture(scope="module")
def default_cases(default_model: Path, default_prompts: list[list[int]]) -> list[Case]:
    torch.set_num_threads(2)
    oracle = Oracle(default_model)
    try:
        return [Case(prompt, oracle.greedy(prompt, NUM_TOKENS)) for prompt in default_prompts]
    finally:
        torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_default_model_in_float32_equals_generate(
    tmp_path: Path, transport: str, default_model: Path, default_cases: list[Case]
) -> None:
    """Over one transport every prompt alone and 16 at a time; over the others 16 at a time."""
    environ = {"KVRELAY_DTYPE": "float32", "KVRELAY_KV_MEMORY": "2GiB"}
    async with running_cluster(default_model, tmp_path, transport=transport, environ=environ) as cluster:
        if transport == "shm":
            await same_alone_and_together(cluster, default_cases, at_once=16)
        else:
            await same_together(cluster, default_cases, at_once=16)
        await cluster.assert_empty()
        assert not cluster.fallbacks, f"{cluster.fallbacks}\n{cluster.logs()}"
        assert cluster.load("decode-0").prefill_tokens == 0
        colocated = [
            await cluster.generate(case.prompt, max_tokens=NUM_TOKENS, policy="never") for case in default_cases[:40]
        ]
        assert colocated == [case.expected for case in default_cases[:40]]
        await cluster.assert_empty()


BF16_MARGIN = 0.35
"""In bfloat16 two ways of summing may choose differently only where the best two logits lie this close (docs/adr)."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_default_model_in_bfloat16_differs_only_at_near_ties(
    tmp_path: Path, default_model: Path, default_prompts: list[list[int]]
) -> None:
    oracle = Oracle(default_model)
    prompts = default_prompts[:60]
    environ = {"KVRELAY_DTYPE": "bfloat16", "KVRELAY_KV_MEMORY": "1GiB"}
    async with running_cluster(default_model, tmp_path, transport="shm", environ=environ) as cluster:
        for prompt in prompts:
            output = await cluster.generate(prompt, max_tokens=NUM_TOKENS)
            for position, token in enumerate(output):
                best, gap = oracle.top_two_gap(prompt + output[:position])
                assert token == best or gap < BF16_MARGIN, f"a token that is not the best, {gap:.2f} below it"
        await cluster.assert_empty()
