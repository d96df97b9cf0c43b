"""From an experiment's name to a folder of results: everything is wired here."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from benchmarks.experiments.conductor import Conductor
from benchmarks.experiments.machine import command_line, commit, this_machine, versions
from benchmarks.experiments.one_run import RunMaker
from benchmarks.experiments.results import Manifest, ResultFolder
from benchmarks.experiments.spec import Experiment
from benchmarks.topologies.fake_model import write_fake_model
from benchmarks.topologies.running import Place
from benchmarks.topologies.spec import SettingValue
from benchmarks.workloads.traces import TraceRow, read_trace
from benchmarks.workloads.words import load_words
from cluster.commands.model import model_store
from cluster.console import progress_bar
from service_kit.cpus import available_cpus

FAKE = "fake"
FAKE_KV_BYTES_PER_TOKEN = 16
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def run_experiment(
    experiment: Experiment, folder: ResultFolder, *, traces: Path | None, environ: Mapping[str, str], console: Console
) -> Manifest:
    """Run it into `folder`. Interrupted by Ctrl-C, what was measured stays.

    Args:
        traces: the folder that trace names are relative to.

    Raises:
        SpecError, ModelError
    """
    topologies = experiment.resolved_topologies()
    folder.create()
    settings: dict[str, SettingValue] = dict(experiment.settings)
    if experiment.model == FAKE:
        model_dir = write_fake_model(folder.directory / "fake-model")
        settings = {"runner": "fake", "served_model": FAKE, **settings}
    else:
        with progress_bar(console) as on_progress:
            model_dir = model_store(environ).resolve(experiment.model, on_progress).directory
    cpus = available_cpus()
    manifest = Manifest(
        experiment=experiment,
        topologies=topologies,
        machine=this_machine(cpus),
        versions=versions(),
        commit=commit(),
        command=command_line(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        kv_bytes_per_token=kv_bytes_per_token(model_dir, settings),
    )
    folder.write_manifest(manifest)

    @functools.cache
    def trace(name: str) -> Sequence[TraceRow]:
        return read_trace((traces or Path()) / name)

    runs = RunMaker(experiment, load_words(model_dir), trace, console)
    place = Place(model_dir, settings, cpus, environ, folder.logs)
    conductor = Conductor(experiment, manifest, folder, place, runs, console)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(conductor.run())
    return manifest


def kv_bytes_per_token(model_dir: Path, settings: Mapping[str, SettingValue]) -> int | None:
    """Of one token's keys and values over all layers; None for a model whose configuration does not say."""
    if settings.get("runner") == FAKE:
        return FAKE_KV_BYTES_PER_TOKEN
    config = msgspec.json.decode((model_dir / "config.json").read_bytes(), type=dict)
    dtype = str(settings.get("dtype", "auto"))
    if dtype == "auto":
        dtype = str(config.get("dtype") or config.get("torch_dtype"))
    try:
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        return int(2 * config["num_hidden_layers"] * kv_heads * head_dim * DTYPE_BYTES[dtype])
    except KeyError:
        return None


def restrict_to(cpus: Sequence[int]) -> None:
    """Let this process and all that it starts use these CPUs alone."""
    os.sched_setaffinity(0, cpus)
