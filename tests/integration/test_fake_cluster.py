"""The whole path with the fake runner, whose tokens depend on every byte of KV: processes, hand-off, cancel, death.

Quick, since no process loads torch; what is shown here is everything but the model.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cluster_harness import Cluster, running_cluster
from fake_reference import fake_model_dir, reference

from coordinator.generation import GenerationError
from transport.registry import available_schemes
from wire.sequence import SamplingParams, StopRules

BLOCK = 16
CHUNK = 64
NUM_BLOCKS = 256
TRANSPORTS = (
    "zmq",
    "zmq-ipc",
    "shm",
    pytest.param("ucx", marks=pytest.mark.skipif("ucx" not in available_schemes(), reason="ucxx is not installed")),
)
FAKE = {"KVRELAY_RUNNER": "fake", "KVRELAY_BLOCK_SIZE": str(BLOCK), "KVRELAY_PREFILL_CHUNK": str(CHUNK)}


@pytest.fixture(params=TRANSPORTS)
async def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Cluster]:
    environ = {**FAKE, "KVRELAY_NUM_BLOCKS": str(NUM_BLOCKS)}
    async with running_cluster(
        fake_model_dir(tmp_path / "model"), tmp_path / "logs", transport=request.param, environ=environ
    ) as running:
        yield running


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(256) for _ in range(length)]


async def test_every_length_gives_the_tokens_of_one_process(cluster: Cluster) -> None:
    """1. Prompts around every border go through P and D. 2. Outputs equal the reference. 3. D computed no prompt token."""
    lengths = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 500]
    for length in lengths:
        prompt = prompt_of(length)
        assert await cluster.generate(prompt, max_tokens=20) == reference(prompt, 20), length
    together = [prompt_of(length, seed) for length in lengths for seed in (1, 2)]
    outputs = await asyncio.gather(*(cluster.generate(prompt, max_tokens=20) for prompt in together))
    assert outputs == [reference(prompt, 20) for prompt in together]

    await cluster.assert_empty()
    assert cluster.load("decode-0").prefill_tokens == 0
    assert cluster.load("decode-0").handoffs == len(lengths) * 3


async def test_prefix_hits_on_either_side_change_nothing(cluster: Cluster) -> None:
    """1. Prime both caches. 2. The same prompt, longer ones and shorter ones are still right, and less is sent."""
    base = prompt_of(5 * BLOCK)
    assert await cluster.generate(base, max_tokens=8) == reference(base, 8)
    await cluster.assert_empty()
    sent = cluster.load("decode-0").handoff_bytes
    for length in (5 * BLOCK, 5 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 7):
        assert await cluster.generate(base[:length], max_tokens=8) == reference(base[:length], 8), length
    for extra in (1, BLOCK, 4 * BLOCK + 3):
        prompt = base + prompt_of(extra, 9)
        assert await cluster.generate(prompt, max_tokens=8) == reference(prompt, 8), extra
    # D's own decode steps cached blocks as well: prime by a colocated request, then hand the same prompt off.
    other = prompt_of(6 * BLOCK, 3)
    assert await cluster.generate(other, max_tokens=40, policy="never") == reference(other, 40)
    longer = other + reference(other, 40)
    assert await cluster.generate(longer, max_tokens=8) == reference(longer, 8)
    await cluster.assert_empty()
    blocks_sent = (cluster.load("decode-0").handoff_bytes - sent) // (BLOCK * 16)
    # 0 + 1 + 0 + 1 for the shorter ones, 1 + 1 + 5 for the longer ones, 1 behind the colocated request's.
    assert blocks_sent == 10


async def test_seeded_sampling_is_the_same_everywhere(cluster: Cluster) -> None:
    sampling = SamplingParams(seed=1234, temperature=0.8)
    prompt = prompt_of(100)
    handed_off = await cluster.generate(prompt, max_tokens=30, sampling=sampling)
    assert handed_off == await cluster.generate(prompt, max_tokens=30, sampling=sampling, policy="never")
    assert handed_off != await cluster.generate(prompt, max_tokens=30, sampling=SamplingParams(seed=5, temperature=0.8))
    await cluster.assert_empty()


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
async def test_L1_exactly_as_many_tokens_as_asked_for(cluster: Cluster, num_tokens: int) -> None:
    prompt = prompt_of(70)
    assert await cluster.generate(prompt, max_tokens=num_tokens) == reference(prompt, num_tokens)
    await cluster.assert_empty()
    if num_tokens == 1:
        assert cluster.load("decode-0").handoffs == 0


async def test_L3_a_first_token_that_ends_the_sequence_never_decodes(cluster: Cluster) -> None:
    sampling = SamplingParams(seed=0, temperature=0.0, logit_bias={7: 100.0})
    rules = StopRules(max_tokens=10, eos_token_ids=(7,))
    assert await cluster.generate(prompt_of(70), max_tokens=10, sampling=sampling, stop=rules) == [7]
    await cluster.assert_empty()
    assert cluster.load("decode-0").decode_tokens == 0


async def test_cancel_at_random_moments_leaves_nothing(cluster: Cluster) -> None:
    """1. 200 requests, each cancelled at a random moment. 2. Every pool is back. 3. One as large as the pool is served."""
    rng = random.Random(7)
    ends: Counter[str] = Counter()

    async def cancelled(seed: int) -> None:
        generation = await cluster.submit(prompt_of(rng.randrange(1, 400), seed), max_tokens=50)
        asyncio.get_running_loop().call_later(rng.random() * 0.15, generation.cancel)
        num_tokens, finished = 0, False
        try:
            async with asyncio.timeout(10):
                async for batch in generation:
                    num_tokens += len(batch.tokens)
                    finished = batch.finish is not None
        except GenerationError as error:
            ends[str(error.status)] += 1
        else:
            ends["finished" if finished else "499"] += 1
        assert not finished or num_tokens == 50

    for start in range(0, 200, 10):
        await asyncio.gather(*(cancelled(seed) for seed in range(start, start + 10)))
    assert ends.keys() <= {"499", "finished"}
    assert ends["499"] > 50
    await cluster.assert_empty(timeout_s=2.0)
    largest = prompt_of((NUM_BLOCKS - 2) * BLOCK)
    assert await cluster.generate(largest, max_tokens=20) == reference(largest, 20)
    await cluster.assert_empty()


async def test_a_full_pool_queues_preempts_and_is_right(tmp_path: Path) -> None:
    """K2: 1. A pool for little more than one request. 2. Eight at once queue and preempt. 3. Every text is the solo one."""
    environ = {**FAKE, "KVRELAY_NUM_BLOCKS": "20"}
    async with running_cluster(fake_model_dir(tmp_path / "model"), tmp_path / "logs", environ=environ) as cluster:
        with pytest.raises(GenerationError) as refused:
            await cluster.generate(prompt_of(21 * BLOCK), max_tokens=5)
        assert refused.value.status == 400
        prompts = [prompt_of(90 + seed, seed) for seed in range(8)]
        outputs = await asyncio.gather(*(cluster.generate(prompt, max_tokens=150) for prompt in prompts))
        assert outputs == [reference(prompt, 150) for prompt in prompts]
        await cluster.assert_empty()
        assert cluster.load("decode-0").preemptions > 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_killed_worker_costs_no_request_and_its_successor_serves(tmp_path: Path, role: str) -> None:
    """1. Eight streams run. 2. `kill -9` one worker. 3. Every stream ends right, or with an error, within 10 s.
    4. The worker is started again under its name, nobody else is, and the pair serves."""
    environ = {**FAKE, "KVRELAY_NUM_BLOCKS": "256", "KVRELAY_FAKE_STEP_S": "0.01"}
    async with running_cluster(fake_model_dir(tmp_path / "model"), tmp_path / "logs", environ=environ) as cluster:
        victim = cluster.workers[f"{role}-0"]
        prompts = [prompt_of(300 + seed, seed) for seed in range(8)]
        streams = [asyncio.create_task(cluster.generate(prompt, max_tokens=60)) for prompt in prompts]
        await asyncio.sleep(0.15)
        victim.kill()
        victim.start()
        async with asyncio.timeout(15):
            results = await asyncio.gather(*streams, return_exceptions=True)
        for prompt, result in zip(prompts, results, strict=True):
            assert isinstance(result, GenerationError) or result == reference(prompt, 60)
        await cluster.wait_ready()
        prompt = prompt_of(200, 99)
        assert await cluster.generate(prompt, max_tokens=30) == reference(prompt, 30)
        await cluster.assert_empty()
        assert cluster.load("decode-0").handoffs > 0


async def test_a_stopped_prefill_worker_is_fenced(tmp_path: Path) -> None:
    """1. P is stopped in the middle. 2. Its requests end right elsewhere. 3. P comes back, and both serve again."""
    environ = {**FAKE, "KVRELAY_NUM_BLOCKS": "256", "KVRELAY_FAKE_STEP_S": "0.02"}
    async with running_cluster(
        fake_model_dir(tmp_path / "model"), tmp_path / "logs", transport="shm", environ=environ
    ) as cluster:
        prompts = [prompt_of(400 + seed, seed) for seed in range(4)]
        streams = [asyncio.create_task(cluster.generate(prompt, max_tokens=20)) for prompt in prompts]
        await asyncio.sleep(0.1)
        cluster.workers["prefill-0"].send_signal(signal.SIGSTOP)
        async with asyncio.timeout(20):
            results = await asyncio.gather(*streams, return_exceptions=True)
        for prompt, result in zip(prompts, results, strict=True):
            assert isinstance(result, GenerationError) or result == reference(prompt, 20)
        cluster.workers["prefill-0"].send_signal(signal.SIGCONT)
        await cluster.wait_ready()
        prompt = prompt_of(200, 99)
        assert await cluster.generate(prompt, max_tokens=30) == reference(prompt, 30)
        await cluster.assert_empty()
