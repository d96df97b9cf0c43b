"""Tools at the front door: prompts, forced grammars, calls in whole answers and streams."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llguidance
import pytest
from api_client import CH, Door, assert_error, events
from scripted_generator import ScriptedGenerator, says
from serving_case import choices_of, plain_choices
from tiny_model import EOS, write_model

from coordinator.text_model import TextModel
from coordinator.tool_formats import ToolFormat, forced_calls

MakeDoor = Callable[..., Door]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time"}},
]
TWO_CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
HERMES_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ c.function.arguments.city }}{% endfor %}{% endif %};{% endfor %}"
)
LLAMA_TEMPLATE = '{% if tools %}{{ tools | length }} "parameters": <|python_tag|>{% endif %}{{ messages[0].content }}'
FOREIGN_TEMPLATE = "{% if tools %}[AVAILABLE_TOOLS]{% endif %}{{ messages[0].content }}"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """The tiny model with room for descriptions of tools."""
    return TextModel.load(write_model(tmp_path_factory.mktemp("wide"), max_model_len=4096), name="tiny")


def saying(model: TextModel, text: str) -> ScriptedGenerator:
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    return ScriptedGenerator(source=says(*ids, EOS))


def prompt_text(front: Door, model: TextModel) -> str:
    return model.tokenizer.decode(front.script.specs[-1].prompt, skip_special_tokens=False)


async def test_I5_two_calls_whole_and_streamed(door: MakeDoor, text: TextModel) -> None:
    front = door(saying(text, f"I look.\n{TWO_CALLS}"), model=text)
    answer = (await front.post(CH, tools=TOOLS)).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather", "time"]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"city": "Köln"}, {}]
    assert len({call["id"] for call in calls}) == 2
    chunks = events(await front.post(CH, tools=TOOLS, stream=True))
    assert choices_of(chunks) == plain_choices(answer)
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert [delta["index"] for delta in deltas if "id" in delta] == [0, 1]
    assert sum("arguments" in delta["function"] for delta in deltas) > 4, "arguments come in pieces"


async def test_I5_content_is_null_when_there_are_only_calls(door: MakeDoor, text: TextModel) -> None:
    front = door(saying(text, TWO_CALLS), model=text)
    answer = (await front.post(CH, tools=TOOLS, n=2, logprobs=True)).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == [None, None]
    assert all(choice["logprobs"]["content"] for choice in answer["choices"])
    chunks = events(await front.post(CH, tools=TOOLS, n=2, stream=True))
    assert all(not chunk["choices"][0]["delta"].get("content") for chunk in chunks)
    assert {choice["finish_reason"] for choice in choices_of(chunks)} == {"tool_calls"}


async def test_without_tools_or_with_none_such_text_is_text(door: MakeDoor, text: TextModel) -> None:
    front = door(saying(text, TWO_CALLS), model=text)
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = (await front.post(CH, **fields)).json()["choices"]
        assert choice["message"]["content"] == TWO_CALLS
        assert choice["finish_reason"] == "stop"
        assert "weather" not in prompt_text(front, text), "tools that may not be called are not shown"


async def test_a_template_without_tools_has_them_described(door: MakeDoor, text: TextModel) -> None:
    front = door(model=text)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call("c1", '{"city": "Köln"}')]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    await front.post(CH, messages=messages, tools=TOOLS, max_tokens=1)
    shown = prompt_text(front, text)
    assert shown.count("<|im_start|>system\nBe brief.\n\n# Tools") == 1
    assert json.dumps(TOOLS[0]) in shown
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>' in shown
    assert "<|im_start|>user\n<tool_response>\nrain\n</tool_response>" in shown


def call(call_id: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": arguments}}


async def test_a_template_with_tools_gets_them(door: MakeDoor, tmp_path: Path) -> None:
    model = TextModel.load(write_model(tmp_path / "hermes", HERMES_TEMPLATE), name="tiny")
    front = door(model=model)
    messages = [{"role": "assistant", "content": None, "tool_calls": [call("c1", '{"city": "Köln"}')]}]
    await front.post(CH, messages=messages, tools=TOOLS[:1], max_tokens=1)
    assert prompt_text(front, model) == f"{json.dumps(TOOLS[0])}<tool_call>assistant:Köln;"


async def test_llama3_calls(door: MakeDoor, tmp_path: Path) -> None:
    model = TextModel.load(write_model(tmp_path / "llama", LLAMA_TEMPLATE), name="tiny")
    front = door(saying(model, '{"name": "weather", "parameters": {"city": "Köln"}}'), model=model)
    (choice,) = (await front.post(CH, tools=TOOLS)).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
    await front.post(CH, tools=TOOLS, tool_choice="required", max_tokens=1)
    assert '"parameters"' in front.script.specs[-1].grammar


async def test_an_unknown_family_can_only_be_forced(door: MakeDoor, tmp_path: Path) -> None:
    model = TextModel.load(write_model(tmp_path / "foreign", FOREIGN_TEMPLATE), name="tiny")
    front = door(saying(model, TWO_CALLS), model=model)
    error = assert_error(await front.post(CH, tools=TOOLS), 400, "tools", "unsupported_parameter")
    assert "template" in error["message"]
    (choice,) = (await front.post(CH, tools=TOOLS, tool_choice="required")).json()["choices"]
    assert len(choice["message"]["tool_calls"]) == 2


async def test_I1_forced_calls_have_a_grammar(door: MakeDoor, text: TextModel) -> None:
    front = door(model=text)
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, several in (("required", True), (named, False)):
        await front.post(CH, tools=TOOLS, tool_choice=choice, max_tokens=1)
        assert "weather" in front.script.specs[-1].grammar
        assert ("time" in front.script.specs[-1].grammar) is several
    await front.post(CH, tools=TOOLS, tool_choice="auto", max_tokens=1)
    assert front.script.specs[-1].grammar == ""
    bad = [{"type": "function", "function": {"name": "f", "parameters": {"type": "not-a-type"}}}]
    assert_error(await front.post(CH, tools=bad, tool_choice="required"), 400, "tool_choice", "invalid_grammar")


@pytest.mark.parametrize(
    ("form", "several"), [(ToolFormat.HERMES, True), (ToolFormat.HERMES, False), (ToolFormat.LLAMA3, True)]
)
def test_forced_grammars_accept_exactly_calls(text: TextModel, form: ToolFormat, several: bool) -> None:
    recursive = {"$defs": {"t": {"type": "object", "properties": {"t": {"$ref": "#/$defs/t"}}}}, "$ref": "#/$defs/t"}
    functions = [TOOLS[0]["function"], {"name": "tree", "parameters": recursive}]
    tokenizer = llguidance.LLTokenizer(text.tokenizer.to_json(), n_vocab=text.vocab_size, eos_token=EOS)

    def accepts(output: str) -> bool:
        matcher = llguidance.LLMatcher(tokenizer, forced_calls(functions, form, several), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = list(text.tokenizer.encode(output, add_special_tokens=False))
        return matcher.consume_tokens(ids) and matcher.is_accepting()

    key = form.arguments_key
    one = f'{{"name": "weather", "{key}": {{"city": "Köln"}}}}'
    two = f'{{"name": "tree", "{key}": {{"t": {{"t": {{}}}}}}}}'
    other = f'{{"name": "weather", "{key}": {{"town": "x"}}}}'
    if form is ToolFormat.HERMES:
        one, two, other = (f"<tool_call>\n{body}\n</tool_call>" for body in (one, two, other))
    assert accepts(one)
    assert accepts(two)
    assert not accepts(other)
    assert not accepts(" " + one)
    assert accepts(one + ("; " if form is ToolFormat.LLAMA3 else "\n") + two) is several


async def test_what_makes_no_sense_is_named(door: MakeDoor) -> None:
    front = door()
    strict = [{"type": "function", "function": {"name": "f", "strict": True}}]
    for fields, param in (
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tools": TOOLS + TOOLS}, "tools"),
        ({"tools": strict}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "ü"}}]}, "tools[0].function.name"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "regex": "a"}, "tool_choice"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [call("c", "{")]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [call("c", "{}")]}]}, "messages[0].tool_calls"),
    ):
        assert_error(await front.post(CH, **fields), 400, param)
    assert (await front.post(CH, tools=[], tool_choice="auto", parallel_tool_calls=False)).status_code == 200
