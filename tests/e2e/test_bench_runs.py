"""`kvrelay bench` as a user runs it: the smoke experiment whole, and a calibration against costs that were put in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.experiments.results import Results, read_results
from benchmarks.load.records import RequestRecord
from benchmarks.stats.request_metrics import finished, gaps_s, ttft_s

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600.0

STEP_S, TOKEN_S, TRANSFER_S, PROMPT = 0.050, 0.001, 0.120, 48
"""The fake runner's costs, the delay of the one put of a prompt that is shorter than a block, and that prompt's length."""
BEST_ERROR_S, MEDIAN_ERROR_S = 0.025, 0.150
"""How far above what was put in the fastest and the median request may be: a loaded machine wakes up late."""
GRAIN_S, JITTER_S = 0.002, 0.010
"""How far below: nothing is faster than its cost, but a piece that came late makes the gap behind it shorter."""

CALIBRATION = f"""
name = "calibration"
title = "Calibration"
question = "Is what was put in measured?"
model = "fake"
topologies = ["0p1d-unpinned", "1p1d-unpinned"]
slo = {{ ttft_ms = 5000, tpot_ms = 5000 }}
max_lateness_ms = 1000
warm_up_s = 1.0

[settings]
fake_step_s = {STEP_S}
fake_token_s = {TOKEN_S}
block_size = 64
faults = "delay:put:seconds={TRANSFER_S}"

[[parts]]
name = "one-by-one"
loads = [1.0]
warmup_s = 1.0
duration_s = 12.0
drain_s = 20.0

[[parts.streams]]
name = "main"
arrivals = {{ process = "closed", concurrency = 1 }}
prompt = {{ dist = "fixed", tokens = {PROMPT} }}
output = {{ dist = "fixed", tokens = 8 }}
"""


def bench(*arguments: str) -> str:
    """Returns what it printed."""
    command = [sys.executable, "-m", "cluster.cli", "bench", *arguments]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_")}
    outcome = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert outcome.returncode == 0, outcome.stdout[-2000:] + outcome.stderr[-4000:]
    return outcome.stdout


def records(results: Results, topology: str) -> list[RequestRecord]:
    found = [one for run in results.runs if run.topology == topology for one in finished(results.requests[run.id])]
    assert len(found) >= 5, f"{topology}: {[(run.failed, run.invalid) for run in results.runs]}"
    return found


def assert_latency(what: str, seconds: Sequence[float], put_in_s: float) -> None:
    best = min(seconds) - put_in_s
    assert -GRAIN_S <= best <= BEST_ERROR_S, f"{what}: {min(seconds):.4f} s at best, {put_in_s:.4f} s were put in"
    assert_median(what, seconds, put_in_s)


def assert_median(what: str, seconds: Sequence[float], put_in_s: float) -> None:
    median = float(np.median(seconds)) - put_in_s
    assert -JITTER_S <= median <= MEDIAN_ERROR_S, f"{what}: median {np.median(seconds):.4f} s, {put_in_s:.4f} s were put in"


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_what_was_put_in_is_measured(tmp_path: Path) -> None:
    """A cluster whose steps and transfers have known costs, measured over HTTP by the same client as everything else."""
    path = tmp_path / "calibration.toml"
    path.write_text(CALIBRATION)
    bench("run", str(path), "--out", str(tmp_path / "out"))
    results = read_results(tmp_path / "out")

    # 1. colocated: the first token after one step over the prompt, every other one after a step of one token
    colocated = records(results, "0p1d")
    prefill_s, decode_s = STEP_S + PROMPT * TOKEN_S, STEP_S + TOKEN_S
    assert_latency("colocated TTFT", [value for one in colocated if (value := ttft_s(one)) is not None], prefill_s)
    assert_median("colocated ITL", [float(np.median(gaps_s(one))) for one in colocated], decode_s)

    # 2. split: the same TTFT, since P sends the first token before the transfer; the second one waits for the transfer
    split = records(results, "1p1d")
    assert_latency("split TTFT", [value for one in split if (value := ttft_s(one)) is not None], prefill_s)
    assert_median("second token", [float(gaps_s(one)[0]) for one in split], TRANSFER_S + decode_s)
    assert_median("split ITL", [float(np.median(gaps_s(one)[1:])) for one in split], decode_s)

    # 3. the server's own timeline tells the same
    stages = [one.timeline for one in split if one.timeline]
    assert len(stages) == len(split)
    assert_latency("prefill_ms", [one["prefill_ms"] / 1e3 for one in stages], prefill_s)
    assert min(one["transfer_ms"] for one in stages) / 1e3 >= TRANSFER_S


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_smoke_writes_the_whole_report(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("the smoke experiment compares two topologies on two cores")
    out = tmp_path / "out"
    printed = bench("run", "smoke", "--out", str(out))
    assert printed.strip().endswith("report.html")

    # 1. all raw records are there, of both topologies; nothing failed
    results = read_results(out)
    assert results.manifest.complete
    assert not results.manifest.skipped
    assert {run.topology for run in results.runs} == {"1p1d", "2c"}
    assert [run.failed for run in results.runs if run.failed] == []
    assert {run.part for run in results.runs} == {"mixed", "lengths", "kill"}
    counted = [one for run in results.runs if run.part == "lengths" for one in finished(results.requests[run.id])]
    assert counted
    assert all(one.prompt_tokens == one.planned_prompt_tokens for one in counted)
    assert all(one.output_tokens == one.planned_output_tokens for one in counted)
    assert all(one.timeline for one in counted)

    # 2. every plot, the tables, and the page
    assert len(list((out / "plots").glob("*.svg"))) == 9
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 9
    assert "kvrelay up --port" in page
    assert (out / "summary.csv").is_file()

    # 3. the same again from the records alone, and beside itself
    assert bench("report", str(out)).strip().endswith("report.html")
    assert "no clear difference" in bench("compare", str(out), str(out), "--out", str(tmp_path / "compare.html"))
    assert (tmp_path / "compare.html").read_text().count("<svg") >= 2
