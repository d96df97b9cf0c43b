"""Workers that die, stop or deliver rubbish, under requests whose answers are known from before."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_reference import VOCAB_SIZE, fake_model_dir
from http_cluster import kvrelay_up, model_environ
from serving_case import CH, C, Served, ask, choices_of, plain_choices, stream
from tiny_models import write_tiny_tokenizer

STEP_S = 0.01


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two of each, slow enough that a signal meets requests in the middle."""
    directory = tmp_path_factory.mktemp("pairs")
    model_dir = fake_model_dir(directory / "model")
    write_tiny_tokenizer(model_dir, VOCAB_SIZE)
    environ = model_environ(
        model_dir=model_dir,
        runner="fake",
        served_model="m",
        block_size=16,
        num_blocks=256,
        prefill_chunk=64,
        fake_step_s=STEP_S,
    )
    with kvrelay_up(directory / "run", "--policy", "always", "--prefill", "2", "--decode", "2", environ=environ) as running:
        yield Served(running, model_dir)


def pid_of(served: Served, worker: str) -> int:
    return int(served.cluster.workers()[worker]["pid"])


async def all_back(served: Served) -> None:
    """The supervisor starts what died; every worker is ready again."""
    deadline = time.monotonic() + 30
    wanted = {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    while not wanted <= set(await asyncio.to_thread(served.cluster.workers)):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (C, {"prompt": "plain", "max_tokens": 60, "ignore_eos": True, "temperature": 0}),
    (C, {"prompt": "seeded", "max_tokens": 60, "ignore_eos": True, "seed": 7, "n": 2, "frequency_penalty": 0.5}),
    (C, {"prompt": "grammar", "max_tokens": 90, "seed": 8, "regex": "([a-f]{4}-){12}"}),
    (C, {"prompt": "stop", "max_tokens": 60, "seed": 9, "ignore_eos": True, "stop": ["zzzzz", "qu"]}),
    (
        CH,
        {
            "max_tokens": 90,
            "seed": 10,
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "list",
                    "schema": {"type": "array", "items": {"enum": ["x", "ü"]}, "minItems": 8, "maxItems": 9},
                },
            },
        },
    ),
    (C, {"prompt": "scored", "max_tokens": 60, "ignore_eos": True, "seed": 11, "echo": True, "logprobs": 1}),
]


async def test_L15_a_dead_decode_worker_is_not_seen_in_the_answer(pairs: Served) -> None:
    """1. Answers of an undisturbed run. 2. The same, streamed and whole, while a decode worker is killed in the middle.
    3. Nothing twice, nothing lost, limits and grammars as before."""
    async with pairs.client("always") as client:
        expected = [await ask(client, path, **body) for path, body in REQUESTS]
        pid = pid_of(pairs, "decode-0")
        whole = [asyncio.create_task(ask(client, path, **body)) for path, body in REQUESTS]
        streamed = [asyncio.create_task(stream(client, path, **body)) for path, body in REQUESTS]
        await asyncio.sleep(20 * STEP_S)
        os.kill(pid, signal.SIGKILL)
        for before, after, chunks in zip(
            expected, await asyncio.gather(*whole), await asyncio.gather(*streamed), strict=True
        ):
            assert after["choices"] == before["choices"]
            assert choices_of(chunks) == plain_choices(before)
            assert after["usage"]["completion_tokens"] == before["usage"]["completion_tokens"]
    await all_back(pairs)
    pairs.cluster.assert_empty()


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.12, 0.2])
async def test_L9_a_dead_prefill_worker_costs_no_request(pairs: Served, delay_s: float) -> None:
    """Killed before, while and after it computes; another one, or the decode worker, takes over."""
    prompts = [[5 + index] * 900 for index in range(4)]
    async with pairs.client("never") as client:
        body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "cache_salt": str(delay_s)}
        expected = [(await ask(client, C, prompt=prompt, **body))["choices"] for prompt in prompts]
    async with pairs.client("always") as client:
        body["cache_salt"] = f"cold {delay_s}"
        await all_back(pairs)
        pid = pid_of(pairs, "prefill-0")
        asked = [asyncio.create_task(ask(client, C, prompt=prompt, **body)) for prompt in prompts]
        await asyncio.sleep(delay_s)
        os.kill(pid, signal.SIGKILL)
        assert [answer["choices"] for answer in await asyncio.gather(*asked)] == expected
    await all_back(pairs)
    pairs.cluster.assert_empty()


async def test_J5_stopped_decode_workers_make_it_unready_until_they_run_again(pairs: Served) -> None:
    pids = [pid_of(pairs, worker) for worker in ("decode-0", "decode-1")]
    async with pairs.client() as client:
        assert (await client.get("/ready")).status_code == 200
        waiting = asyncio.create_task(client.post(C, json={"model": "m", "prompt": "x", "max_tokens": 400}))
        await asyncio.sleep(0.1)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            await _status(client, "/ready", 503)
            assert (await client.get("/health")).status_code == 200, "the coordinator itself holds together"
            answer = await asyncio.wait_for(waiting, 20)
            assert answer.status_code in (200, 500, 503), answer.text
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        await all_back(pairs)
        await _status(client, "/ready", 200)
    pairs.cluster.assert_empty()


async def _status(client: httpx.AsyncClient, path: str, status: int) -> None:
    deadline = time.monotonic() + 15
    while (await client.get(path)).status_code != status:
        assert time.monotonic() < deadline, f"{path} is not {status}"
        await asyncio.sleep(0.1)


async def test_L11_50_parallel_hand_offs_never_mix(pairs: Served) -> None:
    """The fake runner's tokens depend on every byte of every block: a foreign one would change them."""
    prompts = [[3 + (index * 7 + position) % 250 for position in range(1 + index * 23 % 700)] for index in range(50)]
    bodies = [{"prompt": prompt, "max_tokens": 6, "seed": index} for index, prompt in enumerate(prompts)]
    async with pairs.client("never") as client:
        expected = [(await ask(client, C, ignore_eos=True, **body))["choices"] for body in bodies]
    async with pairs.client("always") as client:
        answers = await asyncio.gather(*(ask(client, C, ignore_eos=True, cache_salt="other", **body) for body in bodies))
    assert [answer["choices"] for answer in answers] == expected
    pairs.cluster.assert_empty()
