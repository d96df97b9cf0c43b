"""How large a regular expression is once its repetitions are written out.

llguidance takes `(a{1000}){1000}` in a millisecond and then needs seconds, or minutes, for a single mask: its limits do not
see what a repetition multiplies. So it is counted here, over any text with the syntax of regular expressions or Lark rules.
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_EXPANDED_SIZE = 5_000
_REPEAT = re.compile(r"\{(\d{1,9})?(?:(,)|~)?(\d{1,9})?\}")


def expanded_size(text: str) -> int:
    """Atoms of `text`, each counted as often as the groups around it are repeated; `*`, `+` and `?` repeat nothing."""
    sizes = [0]  # of the groups that are open
    last = 0  # of the atom or group that a repetition would repeat
    index = 0
    while index < len(text):
        char = text[index]
        repeat = _REPEAT.match(text, index) if char == "{" else None
        if repeat is not None and (repeat[1] or repeat[3]):
            times = max(int(repeat[1] or 0), int(repeat[3] or 0), 1)
            sizes[-1] += last * (times - 1)
            last *= times
            index = repeat.end()
            continue
        if char == "(":
            sizes.append(0)
        elif char == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        else:
            index = _atom_end(text, index) - 1
            last = 1
            sizes[-1] += 1
        index += 1
    return sum(sizes)


def _atom_end(text: str, index: int) -> int:
    """Behind one character, one escape, or one class in brackets."""
    if text[index] == "\\":
        return min(index + 2, len(text))
    if text[index] != "[":
        return index + 1
    end = index + 2  # a bracket right behind the opening one is a member
    while end < len(text) and text[end] != "]":
        end += 2 if text[end] == "\\" else 1
    return min(end + 1, len(text)) if end < len(text) else index + 1


def patterns_of(schema: Any) -> list[str]:
    """Every regular expression in a JSON schema, wherever it may stand."""
    found: list[str] = []
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if isinstance(value.get("pattern"), str):
                found.append(value["pattern"])
            if isinstance(value.get("patternProperties"), dict):
                found += value["patternProperties"]
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return found


def schema_text(schema: Any) -> str:
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
