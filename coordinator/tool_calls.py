"""Tool calls out of a model's text, as it comes: content, and for each call its name and the pieces of its arguments.

What is found does not depend on how the text is cut. Text that looks like a call and is none is content.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from coordinator.tool_formats import TOOL_CALL_TAGS, ToolFormat

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_BEGIN, _END = TOOL_CALL_TAGS


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the last call's arguments, which are JSON text when joined."""

    text: str


ToolEvent = Content | CallBegun | Arguments


class ToolCallReader:
    """Feed text with `push`; at the end of the output, `finish`."""

    def __init__(self, form: ToolFormat) -> None:
        self._llama = form is ToolFormat.LLAMA3
        self._text = ""  # not yet decided upon
        self._call: _Call | None = None
        self._only_content = False
        self.num_calls = 0

    def push(self, piece: str) -> list[ToolEvent]:
        self._text += piece
        events: list[ToolEvent] = []
        while self._step(events):
            pass
        return _joined(events)

    def finish(self) -> list[ToolEvent]:
        """What was held back: an unfinished call that has begun stays one, white space and half a tag behind a call are
        nothing, and anything else is content."""
        events: list[ToolEvent] = []
        call, self._call = self._call, None
        if call is not None and not call.begun:
            self._whole_call(call, events)
        elif self._text and (call is None or not call.begun):
            if self._llama and self.num_calls:
                self._text = self._text.strip("; \n")
            elif self.num_calls and _BEGIN.startswith(self._text.strip()):
                self._text = ""  # the limit cut the next call's opening tag
            if self._text.strip() or not self.num_calls:
                events.append(Content(self._text))
        self._text = ""
        return _joined(events)

    def _step(self, events: list[ToolEvent]) -> bool:
        """One decision; False: more text is needed."""
        if self._call is not None:
            return self._read_call(self._call, events)
        if self._only_content:
            events.append(Content(self._text))
            self._text = ""
            return False
        return self._find_json(events) if self._llama else self._find_tag(events)

    def _find_tag(self, events: list[ToolEvent]) -> bool:
        start = self._text.find(_BEGIN)
        if start >= 0:
            before = self._text[:start].rstrip()
            if before:
                events.append(Content(before))
            self._text = self._text[start + len(_BEGIN) :]
            self._call = _Call()
            return True
        keep = _held_tail(self._text)
        shown, self._text = self._text[: len(self._text) - keep], self._text[len(self._text) - keep :]
        if shown:
            events.append(Content(shown))
        return False

    def _find_json(self, events: list[ToolEvent]) -> bool:
        """A call stands at the very beginning, or behind another one."""
        stripped = self._text.lstrip("; \n" if self.num_calls else " \n").removeprefix("<|python_tag|>")
        if not stripped or "<|python_tag|>".startswith(stripped):
            return False
        if stripped[0] == "{":
            self._text = stripped
            self._call = _Call()
            return True
        self._only_content = True
        return True

    def _read_call(self, call: _Call, events: list[ToolEvent]) -> bool:
        text, self._text = self._text, ""
        if call.closed:  # Hermes: up to the closing tag
            end = text.find(_END)
            if end < 0:
                self._text = text[-(len(_END) - 1) :]
                return False
            self._text, self._call = text[end + len(_END) :], None
            return bool(self._text)
        rest = call.push(text)
        if call.name is None and (head := _HEAD.match(call.body)) and (name := _string(head[1])) is not None:
            call.name, call.arguments_at, call.shown = name, head.end(), head.end()
            self.num_calls += 1
            events.append(CallBegun(name))
        if call.name is not None:
            end = call.arguments_end()
            if end > call.shown:
                events.append(Arguments(call.body[call.shown : end]))
                call.shown = end
        if not call.closed and not call.broken:
            return False
        if call.name is None:
            self._whole_call(call, events)
            if call.broken or self._call is None:
                self._call = None
                self._text = rest
                return bool(rest)
        self._text = rest
        if self._llama:
            self._call = None
        return bool(rest)

    def _whole_call(self, call: _Call, events: list[ToolEvent]) -> None:
        """A body whose name was not seen at its beginning: with the keys in another order, or no call at all."""
        try:
            value = json.loads(call.body)
        except ValueError:
            value = None
        if isinstance(value, dict) and isinstance(value.get("name"), str):
            arguments = value.get("arguments", value.get("parameters", {}))
            self.num_calls += 1
            call.name = value["name"]
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            events += [CallBegun(value["name"]), Arguments(text)]
            return
        events.append(Content(call.body if self._llama else f"{_BEGIN}{call.body}"))
        self._call = None
        self._only_content = self._llama


class _Call:
    """One call's JSON object, up to the brace that closes it."""

    def __init__(self) -> None:
        self.body = ""
        self.name: str | None = None
        self.arguments_at = 0
        self.shown = 0
        self.closed = False
        self.broken = False  # it does not begin as an object
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._arguments_end: int | None = None
        self._ends: list[int] = []  # where the depth came back to 1

    @property
    def begun(self) -> bool:
        return self.name is not None

    def push(self, text: str) -> str:
        """Returns what stands behind the object."""
        for index, char in enumerate(text):
            if self._depth == 0 and char not in "{ \n\t\r":
                self.broken = True
                self.body += text[:index]
                return text[index:]
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 1:
                    self._ends.append(len(self.body) + index + 1)
                if self._depth == 0:
                    self.closed = True
                    self.body += text[: index + 1]
                    return text[index + 1 :]
        self.body += text
        return ""

    def arguments_end(self) -> int:
        """Behind the arguments, as far as they are there."""
        return next((end for end in self._ends if end > self.arguments_at), len(self.body))


def _held_tail(text: str) -> int:
    """Characters at the end that may belong to a call: white space, and what could become an opening tag."""
    for length in range(min(len(_BEGIN) - 1, len(text)), 0, -1):
        if text.endswith(_BEGIN[:length]):
            return len(text) - len(text[: len(text) - length].rstrip())
    return len(text) - len(text.rstrip())


def _string(literal: str) -> str | None:
    try:
        value = json.loads(literal)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _joined(events: list[ToolEvent]) -> list[ToolEvent]:
    """Neighbours of one kind as one event, empty content left out."""
    joined: list[ToolEvent] = []
    for event in events:
        if isinstance(event, Content) and not event.text:
            continue
        last = joined[-1] if joined else None
        if isinstance(event, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + event.text)
        elif isinstance(event, Arguments) and isinstance(last, Arguments):
            joined[-1] = Arguments(last.text + event.text)
        else:
            joined.append(event)
    return joined
