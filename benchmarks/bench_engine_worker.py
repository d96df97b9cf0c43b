"""kvrelay's own engine for `bench_engine`: core, scheduler, runner and sampler in one process, as a worker has them.

python -m benchmarks.bench_engine_worker OPTIONS        (the protocol: benchmarks/peers/protocol.py)
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.peers.protocol import Job, Options, prompt_tokens, serve
from engine.core import EngineCore
from engine.engine_config import EngineConfig
from engine.messages import Abort, Add, Fill, Reserve, TokensSampled
from engine.model_config import load_model_config
from engine.model_runner import load_runner
from wire.ids import RequestId
from wire.sequence import SampledToken, SamplingParams, SequenceSpec, StopRules

BLOCK_SIZE = 64
_PROBE_BYTES = 256 * 2**20
_FIRST_TOKEN = SampledToken(17)


class KvrelayEngine:
    def __init__(self, options: Options) -> None:
        torch.set_num_threads(options.threads)
        layout = load_model_config(Path(options.model)).kv_layout(BLOCK_SIZE, options.dtype)
        # Two sequences of the longest length more than a job has: a prefix that is cached beside them.
        self._num_blocks = options.kv_bytes // layout.block_bytes + 3 * layout.blocks_for(options.max_model_len)
        self._runner = load_runner(
            Path(options.model),
            dtype=options.dtype,
            kv_memory=memoryview(bytearray(self._num_blocks * layout.block_bytes)),
            num_blocks=self._num_blocks,
            block_size=BLOCK_SIZE,
            kernels=options.kernels,
        )
        self._runner.warm_up()
        self.version = importlib.metadata.version("kvrelay")
        self.dtype = options.dtype
        self._options = options
        self._core = self._new_core()
        self._job = Job("", 0, 0, 0)
        self._running: list[RequestId] = []
        self._prefix: list[int] = []
        self._number = 0

    def prepare(self, job: Job) -> None:
        """decode: sequences join as on a decode worker, by hand-off. Nobody writes their KV: it is as it was."""
        self._job, self._core = job, self._new_core()
        if job.bench == "prefill":
            self._prefix = self._prompt(job.context)
            if job.context:
                self._run_prompt([*self._prefix, 5])  # leaves its full blocks in the prefix cache
            self.measure(1)
            return
        self._running = []
        for _ in range(job.batch):
            spec = self._spec(self._prompt(job.context - 1), job.steps + 64)
            for command in (Reserve(spec), Fill(spec.request_id, _FIRST_TOKEN)):
                self._core.handle(command, time.monotonic())
            self._running.append(spec.request_id)

    def measure(self, repeats: int) -> list[float]:
        if self._job.bench == "prefill":
            return [self._run_prompt([*self._prefix, *self._prompt(self._job.batch)])[0] for _ in range(repeats)]
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            drawn = self._step()
            times.append(time.perf_counter() - started)
            if len(drawn) != self._job.batch:
                raise RuntimeError(f"a step drew tokens of {len(drawn)} of {self._job.batch} sequences")
        return times

    def release(self) -> None:
        for name in self._running:
            self._core.handle(Abort(name), time.monotonic())
        self._running = []
        self._core.check_conservation()

    def first(self, prompt: list[int]) -> int:
        return self._run_prompt(prompt)[1]

    def machine(self) -> dict[str, float]:
        """What memory and arithmetic give with as many threads: reading, and products of a prompt chunk's size in the faster
        of both dtypes."""
        memory = torch.ones(_PROBE_BYTES // 4)
        rates = []
        for dtype in (torch.float32, torch.bfloat16):
            a, b = torch.ones(512, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
            rates.append(2 * 512 * 1024 * 1024 / _fastest(partial(torch.mm, a, b), 10))
        return {"bytes_per_s": _PROBE_BYTES / _fastest(memory.sum, 10), "operations_per_s": max(rates)}

    def _new_core(self) -> EngineCore:
        limits = EngineConfig(max_batched_tokens=2048, max_num_sequences=self._options.max_sequences, prefill_chunk=512)
        return EngineCore(limits, self._runner.layout, self._num_blocks, self._options.max_model_len)

    def _prompt(self, length: int) -> list[int]:
        self._number += 1
        return prompt_tokens(self._number, length, self._options.vocab_size)

    def _spec(self, prompt: list[int], max_tokens: int) -> SequenceSpec:
        self._number += 1
        stop = StopRules(max_tokens=max_tokens, ignore_eos=True)
        return SequenceSpec(RequestId(f"r{self._number}"), tuple(prompt), SamplingParams(seed=0, temperature=0.0), stop)

    def _step(self) -> list[TokensSampled]:
        plan = self._core.plan(time.monotonic())
        if plan is None:
            raise RuntimeError("the engine has nothing to run: the KV pool is too small for this job")
        events = self._core.apply(plan, self._runner.execute(plan), time.monotonic())
        return [event for event in events if isinstance(event, TokensSampled)]

    def _run_prompt(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds until its first token, and that token."""
        self._core.handle(Add(self._spec(prompt, 1)), time.monotonic())
        started = time.perf_counter()
        while not (drawn := self._step()):
            pass
        return time.perf_counter() - started, drawn[0].tokens[0].token_id


def _fastest(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


if __name__ == "__main__":
    serve("kvrelay", KvrelayEngine)
