"""The whole system over HTTP with the fake runner: disconnects, many streams, a pool that is too small."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator

import httpx
import pytest
from fake_reference import VOCAB_SIZE, fake_model_dir
from http_cluster import HttpCluster, kvrelay_up, model_environ
from tiny_models import write_tiny_tokenizer

NUM_BLOCKS = 256
BLOCK = 16


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpCluster]:
    directory = tmp_path_factory.mktemp("fake")
    model_dir = fake_model_dir(directory / "model")
    write_tiny_tokenizer(model_dir, VOCAB_SIZE)
    environ = model_environ(
        model_dir=model_dir,
        runner="fake",
        served_model="fake",
        block_size=BLOCK,
        num_blocks=NUM_BLOCKS,
        prefill_chunk=64,
        fake_step_s=0.003,
    )
    with kvrelay_up(directory / "run", "--policy", "always", environ=environ) as running:
        yield running


def body(prompt: list[int], max_tokens: int, **more: object) -> dict[str, object]:
    return {"model": "fake", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **more}


async def stream_text(client: httpx.AsyncClient, request: dict[str, object]) -> str:
    text = ""
    async with client.stream("POST", "/v1/completions", json={**request, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        text += json.loads(line)["choices"][0]["text"]
    return text


async def test_64_streams_with_forced_outputs_carry_no_foreign_token(cluster: HttpCluster) -> None:
    """A5: 1. 64 streams at once, each forced to one letter of its own. 2. Each is complete, and equals its plain twin."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60, limits=httpx.Limits(max_connections=100)) as client:
        # Byte-level tokens: 3 special ones, then the alphabet in order.
        requests = [
            body([20 + i, 40, 60 + i % 5] * (1 + i % 40), 64, logit_bias={str(10 + i): 100}, temperature=0)
            for i in range(64)
        ]
        streamed = await asyncio.gather(*(stream_text(client, request) for request in requests))
        assert len(set(streamed)) == 64
        for text in streamed:
            assert len(text) == 64
            assert len(set(text)) == 1
        for request, text in list(zip(requests, streamed, strict=True))[::8]:
            plain = (await client.post("/v1/completions", json=request)).json()
            assert plain["choices"][0]["text"] == text
            assert plain["usage"]["completion_tokens"] == 64
    cluster.assert_empty()


async def test_J1_200_disconnects_at_random_moments_leave_nothing(cluster: HttpCluster) -> None:
    """1. 200 clients leave at a random moment: queued, prefilling, transferring, decoding. 2. Every pool is back within 2 s.
    3. A request that needs the whole pool is served."""
    rng = random.Random(5)

    async def leave_early(seed: int) -> bool:
        prompt = [rng.randrange(3, 250) for _ in range(rng.randrange(1, 700))]
        request = body(prompt, 100, stream=bool(seed % 2))
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
            try:
                async with asyncio.timeout(rng.random() * 0.3):
                    async with client.stream("POST", "/v1/completions", json=request) as response:
                        assert response.status_code == 200
                        async for _ in response.aiter_raw():
                            pass
            except TimeoutError:
                return True
        return False

    left = 0
    for start in range(0, 200, 20):
        left += sum(await asyncio.gather(*(leave_early(seed) for seed in range(start, start + 20))))
    assert left > 100
    cluster.assert_empty(timeout_s=2.0)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        answer = await client.post("/v1/completions", json=body([7] * ((NUM_BLOCKS - 1) * BLOCK), 8))
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
    cluster.assert_empty()


async def test_a_prompt_that_can_never_fit_is_refused_at_the_door(cluster: HttpCluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=30) as client:
        answer = await client.post("/v1/completions", json=body([7] * (NUM_BLOCKS * BLOCK), 8, stream=True))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_the_route_and_the_timeline_are_told(cluster: HttpCluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=30, headers={"X-Kvrelay-Timeline": "1"}) as client:
        split = await client.post("/v1/completions", json=body([9] * 100, 4))
        whole = await client.post("/v1/completions", json=body([9] * 100, 4), headers={"X-Kvrelay-Policy": "never"})
    assert split.headers["x-kvrelay-route"] == "prefill-0>decode-0"
    assert whole.headers["x-kvrelay-route"] == "decode-0"
    (stages,) = split.json()["kvrelay_timeline"]
    for name in (
        "route_ms",
        "reserve_ms",
        "prefill_queue_ms",
        "prefill_ms",
        "transfer_ms",
        "decode_queue_ms",
        "first_step_ms",
    ):
        assert stages[name] >= 0, name
    (stages,) = whole.json()["kvrelay_timeline"]
    assert stages["prefill_ms"] is None


async def test_metrics_and_cluster_view(cluster: HttpCluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=30) as client:
        text = (await client.get("/metrics")).text
    for name in (
        "kvrelay_time_to_first_token_seconds_count",
        "kvrelay_inter_token_latency_seconds_count",
        "kvrelay_request_e2e_seconds_count",
        'kvrelay_stage_seconds_count{stage="prefill_queue"}',
        'kvrelay_stage_seconds_count{stage="decode_queue"}',
        'kvrelay_stage_seconds_count{stage="transfer"}',
        'kvrelay_worker_handoff_bytes_total{role="decode",worker="decode-0"}',
        'kvrelay_worker_waiting_sequences{role="prefill",worker="prefill-0"}',
        'kvrelay_worker_blocks_free{role="decode",worker="decode-0"}',
        'kvrelay_link_up{decode="decode-0",prefill="prefill-0",transport="shm"}',
    ):
        assert name in text, name
    assert set(cluster.workers()) == {"prefill-0", "decode-0"}
    (link,) = cluster.cluster()["links"]
    assert link["up"]
    assert link["transport"] == "shm"
