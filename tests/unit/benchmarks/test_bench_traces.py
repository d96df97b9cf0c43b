"""The forms of the public traces. The rows here are made up: the traces themselves are not in the repository."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from benchmarks.errors import SpecError
from benchmarks.workloads.arrivals import Trace
from benchmarks.workloads.traces import TraceRow, read_trace, scaled_rows

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:48.0000000,12,3
"""
MOONCAKE = (
    '{"timestamp": 500, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}\n'
    '{"timestamp": 2000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 2, 3]}\n'
)


def test_azure_rows_count_from_the_first_and_are_sorted(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    rows = read_trace(path)
    assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [(374, 44), (12, 3), (396, 109)]
    assert [row.at_s for row in rows] == pytest.approx([0.0, 1.31941, 4.314579], abs=1e-5)


def test_mooncake_rows_keep_their_hash_ids_and_may_be_gzipped(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl.gz"
    path.write_bytes(gzip.compress(MOONCAKE.encode()))
    assert read_trace(path) == [TraceRow(0.0, 700, 5, (0, 1)), TraceRow(1.5, 1100, 7, (0, 2, 3))]


def test_scaling_keeps_the_shape_of_gaps_and_cuts_lengths() -> None:
    rows = [TraceRow(0.0, 1000, 100), TraceRow(4.0, 10, 1), TraceRow(10.0, 400, 40), TraceRow(30.0, 1, 1)]
    trace = Trace("t", time_scale=0.5, prompt_scale=0.1, output_scale=0.2, max_prompt_tokens=50, skip_s=2.0)
    found = list(scaled_rows(rows, trace, load=2.0, duration_s=5.0))
    assert found == [TraceRow(0.5, 1, 1), TraceRow(2.0, 40, 8)]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", '{"timestamp": "soon"}\n'])
def test_another_form_is_refused_with_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.csv"
    path.write_text(text)
    with pytest.raises(SpecError, match=r"odd\.csv"):
        read_trace(path)


def test_a_missing_trace_is_refused_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nothing\.csv cannot be read"):
        read_trace(tmp_path / "nothing.csv")
