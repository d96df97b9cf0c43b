"""`response_format`, `regex` and `grammar` at the front door: what is accepted, and that a bad one harms nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from api_client import CH, C, Door, assert_error
from scripted_generator import ScriptedGenerator

from coordinator.grammar_size import expanded_size

MakeDoor = Callable[..., Door]


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


BAD_FORMATS = [
    {"type": "not-a-type"},
    {"type": "array", "uniqueItems": True},
    {"not": {"type": "string"}},
    {"type": "string", "pattern": "(?=a)b"},
    {"type": "string", "pattern": "("},
    {"type": "string", "format": "no-such-format"},
    {"type": "string", "pattern": "(a{1000}){1000}"},
    {"$ref": "http://127.0.0.1:9/schema.json"},
    {"$ref": "#/$defs/missing"},
    {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"enum": [f"value {index}" for index in range(20_000)]},
    nested(200),
]


@pytest.mark.parametrize("schema", BAD_FORMATS, ids=lambda schema: str(schema)[:50])
async def test_I1_I3_a_bad_or_unsupported_schema_is_a_400(door: MakeDoor, schema: Any) -> None:
    """Before the first byte, with the reason, in both modes; no worker hears of it."""
    front = door()
    for stream in (False, True):
        answer = await front.post(CH, response_format=schema_format(schema), stream=stream)
        error = assert_error(answer, 400, "response_format", "invalid_grammar")
        assert len(error["message"]) < 400
    assert front.script.specs == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("regex", "("),
        ("regex", "(a{1000}){1000}"),
        ("regex", "a" * 70_000),
        ("regex", "(?<=a)b"),
        ("grammar", 'start: "a" b'),
        ("grammar", "start: /(/"),
        ("grammar", 'root ::= "a" b'),
        ("grammar", "no grammar at all"),
        ("grammar", "start: start"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_I1_a_bad_regex_or_grammar_is_a_400(door: MakeDoor, field: str, value: str) -> None:
    front = door()
    for path in (C, CH):
        assert_error(await front.post(path, **{field: value}), 400, field, "invalid_grammar")
    assert front.script.specs == []


async def test_I1_a_neighbour_streams_on_beside_bad_grammars(door: MakeDoor) -> None:
    """The loop is never held for long, while expensive grammars are compiled and refused."""
    front = door(ScriptedGenerator())
    longest = 0.0

    async def beat() -> None:
        nonlocal longest
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.005)
            longest = max(longest, time.monotonic() - began)

    await front.post(C, regex="warm-up")  # builds the vocabulary's tree
    beating = asyncio.create_task(beat())
    bad = [front.post(CH, response_format=schema_format(schema)) for schema in BAD_FORMATS]
    neighbour, *answers = await asyncio.gather(front.post(C, max_tokens=100, ignore_eos=True), *bad)
    beating.cancel()
    assert neighbour.status_code == 200
    assert neighbour.json()["usage"]["completion_tokens"] == 100
    assert {answer.status_code for answer in answers} == {400}
    assert longest < 1.0, longest


async def test_good_ones_reach_the_workers_in_their_own_form(door: MakeDoor) -> None:
    front = door()
    good: list[tuple[str, dict[str, Any]]] = [
        (C, {"regex": "[0-9]{4}-[0-9]{2}"}),
        (C, {"grammar": 'start: "a" | "b" start'}),
        (C, {"grammar": 'root ::= "a" | "b" root'}),
        (CH, {"response_format": {"type": "json_object"}}),
        (CH, {"response_format": schema_format({"type": "object", "properties": {"n": {"type": "integer"}}})}),
        (CH, {"response_format": schema_format({"$defs": {"x": {"enum": ["ü", None]}}, "$ref": "#/$defs/x"})}),
    ]
    for path, fields in good:
        answer = await front.post(path, **fields, max_tokens=2, n=2)
        assert answer.status_code == 200, answer.text
    assert all(spec.grammar for spec in front.script.specs)
    assert len({spec.grammar for spec in front.script.specs}) == len(good)
    for nothing in ({"type": "text"}, None):
        await front.post(CH, response_format=nothing)
        assert front.script.specs[-1].grammar == ""


async def test_what_cannot_be_combined_is_named(door: MakeDoor) -> None:
    front = door()
    assert_error(await front.post(CH, regex="a", response_format={"type": "json_object"}), 400, "response_format")
    assert_error(await front.post(C, regex="a", grammar='start: "a"'), 400, "grammar")
    assert_error(await front.post(C, regex="a", ignore_eos=True), 400, "ignore_eos")
    assert_error(await front.post(C, regex="a", min_tokens=2), 400, "min_tokens")
    assert_error(await front.post(C, regex="a", stop_token_ids=[5]), 400, "stop_token_ids")
    assert_error(await front.post(CH, response_format={"type": "json_schema"}), 400, "response_format.json_schema")
    assert_error(await front.post(CH, response_format={"type": "xml"}), 400, "response_format.type")
    assert_error(await front.post(CH, response_format={"type": "json_schema", "json_schema": {"schema": {}}}), 400)


@pytest.mark.parametrize(
    ("text", "size"),
    [("abc", 3), ("[0-9]{4}-[a]{2}", 7), ("(ab{3}){2,10}", 40), ("(a{100}){100}", 10_000), (r"\{3}[]]{2}", 5), ("a{,5}", 5)],
)
def test_repetitions_are_counted(text: str, size: int) -> None:
    assert expanded_size(text) == size
