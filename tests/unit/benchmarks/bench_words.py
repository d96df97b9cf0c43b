"""Words for planned prompts, without a model."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.workloads.traces import TraceRow
from benchmarks.workloads.words import Words

WORDS = Words(tuple(f" w{number}" for number in range(200)))


def count(text: str) -> int:
    return len(text.split())


def no_trace(name: str) -> Sequence[TraceRow]:
    raise AssertionError(f"no trace was expected, but {name}")
