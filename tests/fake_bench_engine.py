"""An engine for `bench_engine`'s protocol that computes nothing: `model` says how it behaves."""

from __future__ import annotations

import sys
import time

from benchmarks.peers.protocol import Job, Options, serve


class FakeEngine:
    version = "1"

    def __init__(self, options: Options) -> None:
        if options.model == "broken":
            sys.stderr.write("no such model here\n")
            raise SystemExit(3)
        print("noise on stdout, which is the protocol's")
        self.dtype = options.dtype
        self._prepared: Job | None = None
        self._behaviour = options.model

    def prepare(self, job: Job) -> None:
        if self._behaviour == "refuses" and job.bench == "prefill":
            raise RuntimeError("no prompts here")
        self._prepared = job

    def measure(self, repeats: int) -> list[float]:
        if self._behaviour == "hangs":
            time.sleep(60)
        assert self._prepared is not None
        return [0.001 * self._prepared.batch] * repeats

    def release(self) -> None:
        self._prepared = None

    def first(self, prompt: list[int]) -> int:
        return sum(prompt) % 100

    def machine(self) -> dict[str, float]:
        return {"bytes_per_s": 1e10, "operations_per_s": 1e11}


if __name__ == "__main__":
    serve("fake", FakeEngine)
