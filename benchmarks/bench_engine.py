"""How fast the engine is on this machine, through its real scheduler and sampler.

    python -m benchmarks.bench_engine --model DIR [--json FILE]

    decode     milliseconds per step, for batch sizes and context lengths; sequences join as on a decode worker, by hand-off
    prefill    tokens per second of one prompt, alone and behind a cached prefix; in chunks, as on a prefill worker

Beside each figure stands its floor: the bytes that must be read over the measured memory bandwidth, or the operations over
the measured rate of matrix products, whichever is longer. A machine that others use gives neither twice: look at ratios, and
at the fastest run beside the median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from engine.core import EngineCore
from engine.decoder_config import ModelConfig
from engine.engine_config import EngineConfig
from engine.messages import Add, Fill, Reserve, TokensSampled
from engine.model_config import load_model_config
from engine.model_runner import ModelRunner, load_runner
from wire.ids import RequestId
from wire.kv_layout import DTYPE_BYTES
from wire.sequence import SampledToken, SamplingParams, SequenceSpec, StopRules

BLOCK_SIZE = 64
_PROBE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `context` counts tokens that are in the KV cache before the step or prompt."""

    bench: str
    engine: str
    threads: int
    batch: int
    context: int
    dtype: str
    value: float  # the median
    unit: str
    best: float
    spread: float  # 10th to 90th percentile over the median
    floor: float
    ratio: float  # of the time to the floor's


@dataclass(frozen=True, slots=True)
class Machine:
    bytes_per_s: float
    operations_per_s: float


class Bench:
    def __init__(self, config: ModelConfig, runner: ModelRunner, num_blocks: int, engine: str) -> None:
        self._config, self._runner, self._num_blocks, self._engine = config, runner, num_blocks, engine
        self._next_id = 0
        # Multiplied for every token: all matrices of the layers. The head runs for drawn tokens alone.
        heads = config.num_heads + 2 * config.num_kv_heads
        attention = config.hidden_size * config.head_dim * (heads + config.num_heads)
        gates = 1 if config.family == "gpt2" else 2
        self._layer_weights = config.num_layers * (attention + config.hidden_size * config.intermediate_size * (gates + 1))
        self._head_weights = config.vocab_size * config.hidden_size

    def decode(self, machine: Machine, threads: int, batch: int, context: int, repeats: int) -> Row:
        core = self._core()
        first = SampledToken(17)
        for _ in range(batch):
            spec = self._spec(self._tokens(context - 1), max_tokens=repeats + 8)
            for command in (Reserve(spec), Fill(spec.request_id, first)):
                core.handle(command, time.monotonic())
        times = []
        for number in range(repeats + 3):
            seconds = self._step(core)
            if number >= 3:
                times.append(seconds)
        layout = self._runner.layout
        size = DTYPE_BYTES[layout.dtype]
        num_bytes = (self._layer_weights + self._head_weights) * size + batch * context * layout.bytes_per_token
        operations = 2 * batch * (self._layer_weights + self._head_weights)
        operations += 4 * batch * context * self._config.num_heads * self._config.head_dim * self._config.num_layers
        floor = max(num_bytes / machine.bytes_per_s, operations / machine.operations_per_s)
        return self._row("decode", threads, batch, context, "ms/step", times, floor, lambda seconds: seconds * 1e3)

    def prefill(self, machine: Machine, threads: int, length: int, cached: int, repeats: int) -> Row:
        core = self._core()
        prefix = self._tokens(cached)
        if cached:
            self._run_prompt(core, (*prefix, 5))  # leaves its full blocks in the prefix cache
        times = [self._run_prompt(core, (*prefix, *self._tokens(length))) for _ in range(repeats + 1)][1:]
        operations = 2 * (length * self._layer_weights + self._head_weights)
        keys = length * cached + length * (length + 1) // 2
        operations += 4 * keys * self._config.num_heads * self._config.head_dim * self._config.num_layers
        floor = operations / machine.operations_per_s
        return self._row("prefill", threads, length, cached, "tok/s", times, floor, lambda seconds: length / seconds)

    def _core(self) -> EngineCore:
        limits = EngineConfig(max_batched_tokens=2048, max_num_sequences=64, prefill_chunk=512)
        return EngineCore(limits, self._runner.layout, self._num_blocks, self._runner.max_model_len)

    def _spec(self, prompt: Sequence[int], max_tokens: int) -> SequenceSpec:
        self._next_id += 1
        stop = StopRules(max_tokens=max_tokens, ignore_eos=True)
        return SequenceSpec(RequestId(f"r{self._next_id}"), tuple(prompt), SamplingParams(seed=0, temperature=0.0), stop)

    def _tokens(self, count: int) -> tuple[int, ...]:
        """Another prompt each time, so that no prefix is found that was not asked for."""
        self._next_id += 1
        return tuple((self._next_id * 7919 + index * 31) % (self._runner.vocab_size - 10) + 5 for index in range(count))

    def _step(self, core: EngineCore) -> float:
        started = time.perf_counter()
        plan = core.plan(time.monotonic())
        if plan is None:
            raise SystemExit("the engine has nothing to run: the KV pool is too small for this batch and context")
        core.apply(plan, self._runner.execute(plan), time.monotonic())
        return time.perf_counter() - started

    def _run_prompt(self, core: EngineCore, prompt: tuple[int, ...]) -> float:
        core.handle(Add(self._spec(prompt, max_tokens=1)), time.monotonic())
        started = time.perf_counter()
        while True:
            plan = core.plan(time.monotonic())
            if plan is None:
                raise SystemExit("the prompt did not fit into the KV pool")
            events = core.apply(plan, self._runner.execute(plan), time.monotonic())
            if any(isinstance(event, TokensSampled) for event in events):
                return time.perf_counter() - started

    def _row(
        self,
        bench: str,
        threads: int,
        batch: int,
        context: int,
        unit: str,
        times: list[float],
        floor: float,
        shown: Callable[[float], float],
    ) -> Row:
        median = statistics.median(times)
        deciles = statistics.quantiles(times, n=10) if len(times) > 1 else [median, median]
        value, best, at_floor = shown(median), shown(min(times)), shown(floor)
        spread = (deciles[-1] - deciles[0]) / median
        dtype = self._runner.layout.dtype
        return Row(bench, self._engine, threads, batch, context, dtype, value, unit, best, spread, at_floor, median / floor)


def measure_machine() -> Machine:
    """With torch's threads: reading memory, and products of the size of a prompt's chunk in the faster of both dtypes."""
    memory = torch.ones(_PROBE_BYTES // 4)
    bandwidth = _PROBE_BYTES / _fastest(memory.sum, 15)
    rates = []
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.ones(512, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
        rates.append(2 * 512 * 1024 * 1024 / _fastest(partial(torch.mm, a, b), 15))
    return Machine(bandwidth, max(rates))


def _fastest(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, help="a converted model's folder")
    parser.add_argument("--dtype", default="auto", help="auto: the model's own")
    parser.add_argument("--kernels", default="auto", choices=("auto", "torch"))
    parser.add_argument("--threads", type=_numbers, default=[1, 2])
    parser.add_argument("--batches", type=_numbers, default=[1, 8, 32])
    parser.add_argument("--contexts", type=_numbers, default=[512, 2048])
    parser.add_argument("--prompts", type=_numbers, default=[128, 512, 2048])
    parser.add_argument(
        "--cached", type=int, default=1536, help="tokens of the cached prefix before a prompt of 512; 0: skip"
    )
    parser.add_argument("--steps", type=int, default=20, help="timed decode steps of each figure")
    parser.add_argument("--repeats", type=int, default=3, help="timed prompts of each figure")
    parser.add_argument("--json", type=Path, help="write the rows here")
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace, report: Callable[[str], object]) -> list[Row]:
    config = load_model_config(arguments.model)
    dtype = config.default_dtype if arguments.dtype == "auto" else arguments.dtype
    layout = config.kv_layout(BLOCK_SIZE, dtype)
    longest = max([*arguments.contexts, *arguments.prompts, 512 + arguments.cached]) + arguments.steps + 16
    num_blocks = max([1, *arguments.batches]) * layout.blocks_for(longest) + 2 * layout.blocks_for(longest)
    memory = memoryview(bytearray(num_blocks * layout.block_bytes))
    runner = load_runner(
        arguments.model,
        dtype=dtype,
        kv_memory=memory,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        kernels=arguments.kernels,
    )
    engine = "kvrelay" if arguments.kernels == "auto" else "kvrelay-torch"
    bench, rows = Bench(config, runner, num_blocks, engine), []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        runner.warm_up()
        machine = measure_machine()
        report(
            f"{threads} thread(s): {machine.bytes_per_s / 1e9:.1f} GB/s, {machine.operations_per_s / 1e9:.0f} GFLOP/s "
            f"({engine}, {dtype})"
        )
        jobs = [
            partial(bench.decode, machine, threads, batch, context, arguments.steps)
            for batch in arguments.batches
            for context in arguments.contexts
        ]
        prompts = [(length, 0) for length in arguments.prompts]
        if arguments.cached:
            prompts.append((512, arguments.cached))
        jobs += [partial(bench.prefill, machine, threads, length, cached, arguments.repeats) for length, cached in prompts]
        for job in jobs:
            row = job()
            rows.append(row)
            report(
                f"  {row.bench:7} batch {row.batch:4} context {row.context:4}: {row.value:8.1f} {row.unit:7} "
                f"best {row.best:8.1f}  spread {row.spread:4.0%}  floor {row.floor:8.1f}  time/floor {row.ratio:.2f}"
            )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _arguments(argv)
    rows = run(arguments, lambda line: sys.stdout.write(line + "\n"))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
