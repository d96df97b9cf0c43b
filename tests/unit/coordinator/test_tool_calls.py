"""Tool calls out of text, whatever the pieces in which it comes."""

from __future__ import annotations

import json
import random

import pytest

from coordinator.tool_calls import Arguments, CallBegun, Content, ToolCallReader, ToolEvent
from coordinator.tool_formats import ToolFormat

HERMES, LLAMA3 = ToolFormat.HERMES, ToolFormat.LLAMA3
CALL_A = '<tool_call>\n{"name": "a", "arguments": {"x": "</tool_call>}", "y": [1, {"z": "\\""}]}}\n</tool_call>'
CALL_B = '<tool_call>{"arguments": {"k": 1}, "name": "b"}</tool_call>'


def read(form: ToolFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    reader = ToolCallReader(form)
    events: list[ToolEvent] = [event for piece in pieces for event in reader.push(piece)] + reader.finish()
    content, calls = "", []
    for event in events:
        match event:
            case Content(text):
                assert text
                content += text
            case CallBegun(name):
                calls.append((name, ""))
            case Arguments(text):
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    assert reader.num_calls == len(calls)
    return content, calls


CASES = [
    (HERMES, "just text ", "just text ", []),
    (HERMES, "", "", []),
    (HERMES, "a < b <tool", "a < b <tool", []),
    (HERMES, f"Let me see.\n\n{CALL_A}", "Let me see.", ["a"]),
    (HERMES, f"{CALL_A}\n{CALL_B}", "", ["a", "b"]),
    (HERMES, f"{CALL_A}\n<tool_", "", ["a"]),
    (HERMES, f"{CALL_A}\n<tools", "\n<tools", ["a"]),
    (HERMES, f"one {CALL_A} two {CALL_B} three", "one two three", ["a", "b"]),
    (HERMES, "<tool_call>no json</tool_call> more", "<tool_call>no json</tool_call> more", []),
    (HERMES, '<tool_call>{"nam": 1}</tool_call>', '<tool_call>{"nam": 1}</tool_call>', []),
    (HERMES, '<tool_call>\n{"name": "a", "argu', '<tool_call>\n{"name": "a", "argu', []),
    (LLAMA3, "just text {", "just text {", []),
    (LLAMA3, '{"name": "a", "parameters": {"x": 1}}', "", ["a"]),
    (LLAMA3, '<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"y": "; {"}}', "", ["a", "b"]),
    (LLAMA3, '{"x": 1} and more', '{"x": 1} and more', []),
    (LLAMA3, '{"name": "a", "parameters": {"x": 1}}\n', "", ["a"]),
]


@pytest.mark.parametrize(("form", "text", "content", "names"), CASES)
def test_I5_calls_do_not_depend_on_the_pieces(form: ToolFormat, text: str, content: str, names: list[str]) -> None:
    whole = read(form, [text])
    assert whole[0] == content
    assert [name for name, _ in whole[1]] == names
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole[1])
    assert read(form, list(text)) == whole
    rng = random.Random(4)
    for _ in range(30):
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randrange(5))))
        assert read(form, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole, cuts


def test_I5_arguments_come_while_they_are_written() -> None:
    reader = ToolCallReader(HERMES)
    assert reader.push('<tool_call>\n{"name": "find", "arguments": ') == []
    assert reader.push('{"q": "lon') == [CallBegun("find"), Arguments('{"q": "lon')]
    assert reader.push('g"}') == [Arguments('g"}')]
    assert reader.push("}\n</tool_call>") == []
    assert reader.finish() == []


def test_an_unfinished_call_that_has_begun_stays_one() -> None:
    assert read(HERMES, ['<tool_call>\n{"name": "a", "arguments": {"x": "cut of']) == ("", [("a", '{"x": "cut of')])
