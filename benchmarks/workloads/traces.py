"""Public request traces: arrival times, lengths and shared prefixes of real services, scaled to a small model.

    AzureLLMInferenceTrace_*.csv    TIMESTAMP, ContextTokens, GeneratedTokens        (Splitwise, ISCA 2024; CC-BY)
    mooncake *.jsonl                timestamp (ms), input_length, output_length, hash_ids   (Mooncake, FAST 2025; Apache-2.0)

Both may be gzipped. docs/experiments.md says where they come from. `hash_ids` has one id per 512 tokens of a prompt; equal
ids at the front of two prompts are a prefix that they share, and they share it here, scaled.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from benchmarks.errors import SpecError
from benchmarks.workloads.arrivals import Trace

HASH_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRow:
    """`at_s` counts from the first row. `hash_ids` is empty where the trace has none."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path) -> list[TraceRow]:
    """The whole trace in the order of arrival.

    Raises:
        SpecError: not there, or in neither form.
    """
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8")
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise SpecError(f"trace: {path} cannot be read: {error}") from error
    lines = text.splitlines()
    if not lines:
        raise SpecError(f"trace: {path} is empty")
    try:
        rows = list(_mooncake(lines) if lines[0].startswith("{") else _azure(text))
    except (KeyError, ValueError, msgspec.DecodeError) as error:
        raise SpecError(f"trace: {path} has neither Azure's nor Mooncake's form: {error}") from error
    rows.sort(key=lambda row: row.at_s)
    start = rows[0].at_s
    return [TraceRow(row.at_s - start, row.prompt_tokens, row.output_tokens, row.hash_ids) for row in rows]


def scaled_rows(rows: Iterable[TraceRow], trace: Trace, load: float, duration_s: float) -> Iterator[TraceRow]:
    """Rows that arrive within a run, with its times and lengths.

    Args:
        load: gaps are divided by it, so their shape stays.
    """
    for row in rows:
        at_s = (row.at_s - trace.skip_s) * trace.time_scale / load
        if at_s < 0:
            continue
        if at_s >= duration_s:
            return
        prompt = min(trace.max_prompt_tokens, max(1, math.ceil(row.prompt_tokens * trace.prompt_scale)))
        output = min(trace.max_output_tokens, max(1, math.ceil(row.output_tokens * trace.output_scale)))
        yield TraceRow(at_s, prompt, output, row.hash_ids)


def _mooncake(lines: Iterable[str]) -> Iterator[TraceRow]:
    for line in lines:
        row = msgspec.json.decode(line, type=_MooncakeRow)
        yield TraceRow(row.timestamp / 1e3, row.input_length, row.output_length, row.hash_ids)


def _azure(text: str) -> Iterator[TraceRow]:
    for row in csv.DictReader(io.StringIO(text)):
        at = datetime.fromisoformat(row["TIMESTAMP"].strip())
        seconds = (at - datetime.fromisoformat("2000-01-01")).total_seconds()
        yield TraceRow(seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
