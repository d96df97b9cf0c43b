"""Structured output and forced tool calls through a real cluster: P and D, colocated, streamed, n > 1, preempted."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fake_reference import VOCAB_SIZE, fake_model_dir
from http_cluster import kvrelay_up, model_environ
from serving_case import CH, C, Served, ask, choices_of, plain_choices, stream
from tiny_models import write_tiny_tokenizer

NUM_SCHEMAS = 40  # 200 in the slow test


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Small, nested, with enums and unicode; every one has a short instance."""
    kind = rng.randrange(8 if depth else 6)
    if kind == 0:
        values = ["a", "ü", "日本", "🦊", 1, -2.5, True, None, 'with "quotes"', ""]
        return {"enum": rng.sample(values, rng.randrange(1, 5))}
    if kind == 1:
        low = rng.randrange(-20, 20)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(0, 50)}
    if kind == 2:
        return {"type": "string", "maxLength": rng.randrange(0, 6)}
    if kind == 3:
        return {"type": "boolean"}
    if kind == 4:
        return {"const": rng.choice(["fixed", 7, None, {"a": [1]}])}
    if kind == 5:
        return {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", "^(é|x)[0-9]+z$", "^20[0-9]{2}-[01][0-9]$"])}
    if kind == 6:
        return {"type": "array", "items": random_schema(rng, depth - 1), "minItems": rng.randrange(2), "maxItems": 2}
    names = rng.sample(["id", "größe", "名前", "a b", "x"], rng.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randrange(1, len(names) + 1)),
        "additionalProperties": False,
    }


def validates(value: Any, schema: dict[str, Any]) -> bool:
    """The part of JSON Schema that `random_schema` uses."""
    if "enum" in schema:
        return any(type(value) is type(item) and value == item for item in schema["enum"])
    if "const" in schema:
        return bool(value == schema["const"])
    match schema["type"]:
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return type(value) is bool
        case "string":
            fits = isinstance(value, str) and len(value) <= schema.get("maxLength", 10**6)
            return fits and re.search(schema.get("pattern", ""), value) is not None
        case "array":
            fits = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
            return fits and all(validates(item, schema["items"]) for item in value)
        case _:
            known = schema["properties"]
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= set(value) <= set(known)
                and all(validates(item, known[name]) for name, item in value.items())
            )


def asked_for(schema: dict[str, Any], seed: int, **more: Any) -> dict[str, Any]:
    wrapped = {"type": "object", "properties": {"v": schema}, "required": ["v"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": wrapped, "strict": True}}
    return {"response_format": form, "seed": seed, "max_tokens": 180, **more}


def check(answer: dict[str, Any], schema: dict[str, Any]) -> int:
    """How many choices came to their end; all of those validate, and the others ran out of tokens."""
    complete = 0
    for choice in answer["choices"]:
        if choice["finish_reason"] == "length":
            assert answer["usage"]["completion_tokens"] >= 180
            continue
        assert choice["finish_reason"] == "stop"
        assert validates(json.loads(choice["message"]["content"])["v"], schema), (schema, choice)
        complete += 1
    return complete


async def schemas_hold(served: Served, policy: str, count: int) -> None:
    rng = random.Random(17)
    schemas = [random_schema(rng) for _ in range(count)]
    complete = 0
    async with served.client(policy) as client:
        for start in range(0, count, 20):
            batch = list(enumerate(schemas[start : start + 20], start))
            answers = await asyncio.gather(*(ask(client, CH, **asked_for(schema, seed, n=2)) for seed, schema in batch))
            complete += sum(check(answer, schema) for answer, (_, schema) in zip(answers, batch, strict=True))
            for answer, (seed, schema) in list(zip(answers, batch, strict=True))[::7]:
                chunks = await stream(client, CH, **asked_for(schema, seed, n=2))
                assert choices_of(chunks) == plain_choices(answer)
    assert complete > count * 2 * 0.9, f"{complete} of {2 * count} came to their end"
    served.cluster.assert_empty()


async def test_I3_random_schemas_all_validate(fake: Served, policy: str) -> None:
    await schemas_hold(fake, policy, NUM_SCHEMAS)


@pytest.mark.slow
async def test_I3_200_random_schemas_with_a_real_sampler(tiny: Served, policy: str) -> None:
    await schemas_hold(tiny, policy, 200)


async def test_I3_a_real_sampler_follows_the_mask(tiny: Served, policy: str) -> None:
    """Greedy, drawn, and against a bias; P and D say what D alone says."""
    for fields in ({"temperature": 0}, {"seed": 5}, {"seed": 6, "logit_bias": {"50": 100}, "frequency_penalty": 1}):
        answer = await tiny.both(C, policy, prompt="when?", regex=r"20[0-9]{2}-(0[1-9]|1[0-2])", max_tokens=20, **fields)
        assert re.fullmatch(r"20[0-9]{2}-(0[1-9]|1[0-2])", answer["choices"][0]["text"])
        assert answer["choices"][0]["finish_reason"] == "stop"
        other = await tiny.ask(C, "never", prompt="when?", regex=r"20[0-9]{2}-(0[1-9]|1[0-2])", max_tokens=20, **fields)
        assert other["choices"] == answer["choices"]
    tiny.cluster.assert_empty()


async def test_I1_bad_schemas_beside_a_stream_that_goes_on(fake: Served, policy: str) -> None:
    async with fake.client(policy) as client:
        neighbour = asyncio.create_task(ask(client, C, prompt="x", max_tokens=300, ignore_eos=True))
        for bad in ({"regex": "("}, {"regex": "(a{1000}){1000}"}, {"grammar": "start: nope"}, {"regex": "a" * 10**6}):
            answer = await client.post(C, json={"model": "m", "prompt": "x", "stream": True, **bad})
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "invalid_grammar"
        recursive = await ask(client, C, prompt="x", grammar='start: "(" start ")" | "x"', max_tokens=40, seed=4)
        assert re.fullmatch(r"\(*x?\)*", recursive["choices"][0]["text"])
        assert (await neighbour)["usage"]["completion_tokens"] == 300
    fake.cluster.assert_empty()


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A decode pool for about one and a half of the requests below, and steps long enough for them to meet in it."""
    directory = tmp_path_factory.mktemp("crowded")
    model_dir = fake_model_dir(directory / "model")
    write_tiny_tokenizer(model_dir, VOCAB_SIZE)
    sizes = {"block_size": 8, "num_blocks": 40, "fake_step_s": 0.002}
    environ = model_environ(model_dir=model_dir, runner="fake", served_model="m", **sizes)
    with kvrelay_up(directory / "run", "--policy", "always", environ=environ) as running:
        yield Served(running, model_dir)


async def test_K2_preempted_output_is_that_of_a_solo_run(crowded: Served, policy: str) -> None:
    """Seeds, penalties and grammars; each equals its run alone, token for token."""
    requests: list[dict[str, Any]] = [
        {"prompt": f"p{index}" * 8, "max_tokens": 150, "seed": index, "ignore_eos": True} for index in range(4)
    ]
    requests[1]["frequency_penalty"] = 0.5
    requests[2] |= {"regex": "([a-f]{4} ){30}", "ignore_eos": False}
    async with crowded.client(policy) as client:
        alone = [await ask(client, C, **request) for request in requests]
        together = await asyncio.gather(*(ask(client, C, **request) for request in requests))
    for one, other in zip(alone, together, strict=True):
        assert one["choices"] == other["choices"]
        assert one["usage"]["completion_tokens"] == other["usage"]["completion_tokens"]
    assert re.fullmatch("([a-f]{4} ){30}", together[2]["choices"][0]["text"])
    crowded.cluster.assert_empty()  # waits for a newer heartbeat
    assert crowded.cluster.workers()["decode-0"]["load"]["preemptions"] > 0


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"unit": {"enum": ["°C", "K"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
                "required": ["unit", "n"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "time")
]


async def test_I5_forced_calls_fit_their_schemas(fake: Served, policy: str) -> None:
    named = {"type": "function", "function": {"name": "time"}}
    for choice, more in (("required", {}), ("required", {"parallel_tool_calls": False}), (named, {"n": 2})):
        answer = await fake.both(CH, policy, tools=TOOLS, tool_choice=choice, max_tokens=600, seed=11, **more)
        for picked in answer["choices"]:
            assert picked["finish_reason"] == "tool_calls"
            assert picked["message"]["content"] is None
            calls = picked["message"]["tool_calls"]
            assert len(calls) == 1 or not more
            for call in calls:
                assert call["function"]["name"] in (("time",) if choice is named else ("weather", "time"))
                arguments = json.loads(call["function"]["arguments"])
                assert arguments["unit"] in ("°C", "K")
                assert 0 <= arguments["n"] <= 99
    fake.cluster.assert_empty()
