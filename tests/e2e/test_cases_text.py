"""Text, stops, counts and shapes through a real cluster, handed over and colocated, whole and streamed (fake runner)."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fake_reference import VOCAB_SIZE
from serving_case import CH, C, Served, ask

# Byte-level tokens of the tiny tokenizer: three special ones, then the alphabet in the order of its stand-ins.
EOS = 2


def token_of(served: Served, text: str) -> list[int]:
    answer = httpx.post(f"{served.cluster.url}/tokenize", json={"prompt": text}, timeout=10).json()
    ids: list[int] = answer["tokens"]
    return ids


def forced(*ids: int) -> dict[str, object]:
    return {"logit_bias": {str(token_id): 100 for token_id in ids}, "temperature": 0}


async def test_A1_a_character_of_several_tokens_is_never_torn(fake: Served, policy: str) -> None:
    """A grammar forces the text; every byte of it is a token of its own."""
    for text in ("🦊🙂日本語 end", "ÿ€é“—…"):
        answer = await fake.both(C, policy, prompt="x", regex=text, max_tokens=60)
        assert answer["choices"][0]["text"] == text
        assert answer["choices"][0]["finish_reason"] == "stop"
        chunks = await fake.stream(C, policy, prompt="x", regex=text, max_tokens=60)
        assert "�" not in "".join(chunk["choices"][0]["text"] for chunk in chunks)


async def test_B1_B9_a_stop_of_three_tokens_ends_the_worker_too(fake: Served, policy: str) -> None:
    (letter,) = token_of(fake, "a")
    for stop, text in ((["aaa"], ""), (["zz", "aa"], ""), (["b"], "a" * 300)):
        answer = await fake.both(C, policy, prompt="x", stop=stop, max_tokens=300, ignore_eos=True, **forced(letter))
        choice = answer["choices"][0]
        assert choice["text"] == text
        assert choice["finish_reason"] == ("length" if text else "stop")
        assert answer["usage"]["completion_tokens"] == (300 if text else len(stop[-1]))
    shown = await fake.ask(
        C, policy, prompt="x", stop=["aaa"], include_stop_str_in_output=True, max_tokens=9, **forced(letter)
    )
    assert shown["choices"][0]["text"] == "aaa"
    fake.cluster.assert_empty()


async def test_B7_without_stops_the_end_token_ends(fake: Served, policy: str) -> None:
    for stop in ([], None):
        answer = await fake.both(CH, policy, stop=stop, max_tokens=5, **forced(EOS))
        assert answer["choices"][0]["text" if "text" in answer["choices"][0] else "message"] is not None
        assert answer["choices"][0]["message"]["content"] == ""
        assert answer["choices"][0]["finish_reason"] == "stop"


async def test_C1_C7_usage_and_indices_of_many_choices(fake: Served, policy: str) -> None:
    answer = await fake.both(C, policy, prompt=["ab", "cde"], n=3, max_tokens=7, seed=3, ignore_eos=True, logprobs=1)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 42
    assert answer["usage"]["total_tokens"] == 47
    answer = await fake.both(CH, policy, n=3, max_tokens=7, seed=3, ignore_eos=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]


async def test_D1_nulls_are_absent(fake: Served, policy: str) -> None:
    nulls = dict.fromkeys(("max_tokens", "n", "stop", "seed", "logprobs", "logit_bias", "stream_options", "top_p", "user"))
    answer = await fake.ask(C, policy, prompt="x", ignore_eos=True, **nulls)
    assert answer["usage"]["completion_tokens"] == 16


async def test_D3_the_context_is_the_limit(fake: Served, policy: str) -> None:
    async with fake.client(policy) as client:
        limit = (await client.get("/v1/models")).json()["data"][0]["max_model_len"]
        for length, max_tokens in ((limit + 1, 1), (limit, 1), (limit - 1, 2), (limit - 1, 10**9)):
            for stream in (False, True):
                body = {"model": "m", "prompt": [5] * length, "max_tokens": max_tokens, "stream": stream}
                answer = await client.post(C, json=body)
                assert answer.status_code == 400, (length, max_tokens)
                assert answer.json()["error"]["code"] == "context_length_exceeded"
                assert "-" not in answer.json()["error"]["message"]
        fits = await ask(client, C, prompt=[5] * (limit - 1), max_tokens=1, ignore_eos=True)
        assert fits["usage"]["completion_tokens"] == 1


async def test_D7_ids_outside_the_vocabulary_never_reach_a_worker(fake: Served, policy: str) -> None:
    async with fake.client(policy) as client:
        neighbour = asyncio.create_task(ask(client, C, prompt="x", max_tokens=100, ignore_eos=True))
        for bad in (VOCAB_SIZE, VOCAB_SIZE + 10**6, -1, 2**63, 1.0, True):
            answer = await client.post(C, json={"model": "m", "prompt": [bad], "max_tokens": 1})
            assert answer.status_code == 400, bad
        await ask(client, C, prompt=[VOCAB_SIZE - 1], max_tokens=1)
        assert (await neighbour)["usage"]["completion_tokens"] == 100


async def test_D9_40_prompts_keep_their_order(fake: Served, policy: str) -> None:
    prompts = ["p" * (1 + 37 * index % 200) + str(index) for index in range(40)]
    answer = await fake.both(C, policy, prompt=prompts, echo=True, max_tokens=1, seed=1)
    assert [choice["index"] for choice in answer["choices"]] == list(range(40))
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        assert choice["text"].startswith(prompt)


async def test_D11_usage_counts_each_prompt_once_and_what_was_cached(fake: Served, policy: str) -> None:
    prompts = [[7] * 5, [9] * 90, [9] * 90]
    for _ in range(2):
        answer = await fake.ask(C, policy, prompt=prompts, n=2, max_tokens=3, seed=1, ignore_eos=True)
        usage = answer["usage"]
        assert usage["prompt_tokens"] == 185
        assert usage["completion_tokens"] == 18
        assert usage["prompt_tokens_details"]["cached_tokens"] <= 185
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2 * 80, "five whole blocks of each long one"


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
async def test_L1_F9_exactly_as_many_tokens_as_asked(fake: Served, policy: str, max_tokens: int) -> None:
    answer = await fake.both(C, policy, prompt="x" * 40, max_tokens=max_tokens, n=8, seed=9, ignore_eos=True)
    assert len(answer["choices"]) == 8
    assert answer["usage"]["completion_tokens"] == 8 * max_tokens
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    fake.cluster.assert_empty()


async def test_L3_F11_the_first_token_may_be_the_last(fake: Served, policy: str) -> None:
    (letter,) = token_of(fake, "a")
    for fields in (forced(EOS), {**forced(letter), "stop": ["a"]}, {**forced(letter), "stop_token_ids": [letter]}):
        answer = await fake.both(C, policy, prompt="x" * 100, max_tokens=50, **fields)
        assert answer["choices"][0]["text"] == ""
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 1
    fake.cluster.assert_empty()


async def test_L17_short_prompts_and_partial_hits_are_the_same_everywhere(fake: Served) -> None:
    """A prompt below one block; one that only D knows; a longer one with its prefix. P and D, and D alone, agree."""
    short, long = [40, 41, 42], [60 + index % 30 for index in range(100)]
    for prompt in (short, long, [*long, 99, 98], [*long[:50], 7]):
        colocated = await fake.ask(C, "never", prompt=prompt, max_tokens=12, temperature=0, ignore_eos=True)
        split = await fake.ask(C, "always", prompt=prompt, max_tokens=12, temperature=0, ignore_eos=True)
        assert split["choices"] == colocated["choices"]
    fake.cluster.assert_empty()


async def test_K6_100_at_once_are_all_complete(fake: Served, policy: str) -> None:
    async with fake.client(policy) as client:
        answers = await asyncio.gather(
            *(ask(client, C, prompt=[5 + index], max_tokens=20, ignore_eos=True, seed=index) for index in range(100))
        )
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [20] * 100
    fake.cluster.assert_empty()


async def test_H5_one_request_id_twice_at_once(fake: Served, policy: str) -> None:
    async with fake.client(policy) as client:
        body = {"model": "m", "prompt": "x", "max_tokens": 60, "ignore_eos": True}
        answers = await asyncio.gather(
            *(client.post(C, json={**body, "seed": seed}, headers={"X-Request-Id": "same"}) for seed in range(6))
        )
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-request-id"] for answer in answers} == {"same"}
    assert len({answer.json()["id"] for answer in answers}) == 6


async def test_L5_L13_leaving_in_the_middle_of_a_hand_off_ends_that_request_alone(fake: Served) -> None:
    """100 clients leave within the time of prefill and transfer, beside one that stays. Then the largest request fits."""
    async with fake.client("always") as client:
        stays = asyncio.create_task(ask(client, C, prompt="s", max_tokens=200, ignore_eos=True))

        async def leave(seed: int) -> None:
            body = {"model": "m", "prompt": [5 + seed % 200] * 900, "max_tokens": 50, "stream": bool(seed % 2)}
            try:
                async with asyncio.timeout(0.002 * (seed % 25)):
                    await client.post(C, json=body)
            except TimeoutError:
                return

        for start in range(0, 100, 20):
            await asyncio.gather(*(leave(seed) for seed in range(start, start + 20)))
        assert (await stays)["usage"]["completion_tokens"] == 200
        fake.cluster.assert_empty(timeout_s=5.0)
        whole = await ask(client, C, prompt=[7] * (255 * 16), max_tokens=8, ignore_eos=True)
        assert whole["usage"]["completion_tokens"] == 8
    fake.cluster.assert_empty()
