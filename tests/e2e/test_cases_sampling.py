"""Greedy, seeded and penalised draws of a real (tiny) model: the same in every company and on every way."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch
import transformers
from serving_case import C, Served, ask


async def test_F1_one_prompt_alone_in_a_crowd_and_joining_late(tiny: Served, policy: str) -> None:
    """1. Alone. 2. Eight of it at once. 3. Among 15 others of random lengths, which are decoding already."""
    rng = random.Random(1)
    fixed = {"prompt": [rng.randrange(3, 259) for _ in range(33)], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    others = [
        {"prompt": [rng.randrange(3, 259) for _ in range(rng.randrange(1, 120))], "max_tokens": 60, "seed": index}
        for index in range(15)
    ]
    async with tiny.client(policy) as client:
        alone = (await ask(client, C, **fixed))["choices"]
        together = await asyncio.gather(*(ask(client, C, **fixed) for _ in range(8)))
        crowd = [asyncio.create_task(ask(client, C, **other)) for other in others]
        await asyncio.sleep(0.1)
        late = await ask(client, C, **fixed)
        await asyncio.gather(*crowd)
    assert [answer["choices"] for answer in together] == [alone] * 8
    assert late["choices"] == alone
    assert (await tiny.ask(C, "never", **fixed))["choices"] == alone
    tiny.cluster.assert_empty()


@pytest.mark.parametrize(
    ("presence", "frequency", "repetition"), [(2.0, 0.0, 1.0), (0.0, 2.0, 1.0), (0.0, -2.0, 1.0), (0.0, 0.0, 1.7)]
)
async def test_F3_penalties_count_what_they_should(
    tiny: Served, policy: str, presence: float, frequency: float, repetition: float
) -> None:
    """The oracle is arithmetic: transformers' logits, plus bias, minus the formula. The prompt is full of one of the two."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny.model_dir, dtype=torch.float32).eval()
    a, b = 68, 69
    tokens, output = [a] * 5, []
    for _ in range(12):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens + output])).logits[0, -1].float()
        logits = logits.clone()
        logits[[a, b]] += 100.0
        for token in {*tokens, *output}:
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        for token in set(output):
            logits[token] -= presence + frequency * output.count(token)
        output.append(int(logits.argmax()))
    body: dict[str, Any] = {
        "prompt": tokens,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "logit_bias": {str(a): 100, str(b): 100},
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "repetition_penalty": repetition,
    }
    answer = await tiny.both(C, policy, **body)
    decoded = "".join(answer["choices"][0]["logprobs"]["tokens"])
    assert decoded == "".join({a: _letter(a), b: _letter(b)}[token] for token in output)


def _letter(token_id: int) -> str:
    """Of the tiny tokenizer: three special tokens, then the printable stand-ins from `!` on."""
    return chr(ord("!") + token_id - 3)


async def test_F9_seeds_repeat_and_differ(tiny: Served, policy: str) -> None:
    body = {"prompt": "once", "max_tokens": 12, "seed": 5, "n": 4, "ignore_eos": True}
    first, second = [await tiny.both(C, policy, **body) for _ in range(2)]
    assert first["choices"] == second["choices"]
    assert len({choice["text"] for choice in first["choices"]}) > 1
    best = await tiny.ask(C, policy, **{**body, "n": 1, "best_of": 4, "logprobs": 0})
    means = {
        sum(choice["logprobs"]["token_logprobs"]) / 12: choice["text"]
        for choice in (await tiny.ask(C, policy, **body, logprobs=0))["choices"]
    }
    assert best["choices"][0]["text"] == means[max(means)]
    assert best["usage"]["completion_tokens"] == 48


def random_request(rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": [rng.randrange(3, 259) for _ in range(rng.randrange(1, 100))],
        "max_tokens": rng.randrange(1, 20),
        "seed": rng.randrange(2**40),
        "temperature": rng.choice([0, 0, 0.7, 1, 2]),
    }
    for name, values in {
        "top_p": [1, 0.9, 0.5],
        "top_k": [0, 5, 1000],
        "min_p": [0, 0.05],
        "n": [1, 1, 3],
        "logprobs": [None, None, 0, 3],
        "echo": [False, False, True],
        "presence_penalty": [0, 1.5],
        "repetition_penalty": [1, 1.3],
        "stop": [None, ["e", "qu"]],
        "min_tokens": [0, 1],
        "ignore_eos": [False, True],
        "regex": [None, None, None, "[a-z]{3,9}"],
    }.items():
        body[name] = rng.choice(values)
    if body["regex"] is not None:
        body |= {"min_tokens": 0, "ignore_eos": False}
    return body


async def compare_random_requests(tiny: Served, count: int) -> None:
    """Streamed = whole, P-D = colocated, batched = alone, for random valid parameters."""
    rng = random.Random(count)
    requests = [random_request(rng) for _ in range(count)]
    for start in range(0, count, 25):
        batch = requests[start : start + 25]
        split = await asyncio.gather(*(tiny.both(C, "always", **request) for request in batch))
        whole = await asyncio.gather(*(tiny.ask(C, "never", **request) for request in batch))
        alone = await tiny.ask(C, "always", **batch[0])
        assert alone["choices"][0]["text"] == split[0]["choices"][0]["text"]
        for request, one, other in zip(batch, split, whole, strict=True):
            for mine, theirs in zip(one["choices"], other["choices"], strict=True):
                assert (mine["text"], mine["finish_reason"]) == (theirs["text"], theirs["finish_reason"]), request
    tiny.cluster.assert_empty()


async def test_F1_random_requests_are_the_same_every_way(tiny: Served) -> None:
    await compare_random_requests(tiny, 50)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_F1_1000_random_requests_are_the_same_every_way(tiny: Served) -> None:
    await compare_random_requests(tiny, 1000)
