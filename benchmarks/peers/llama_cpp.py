"""llama.cpp for `bench_engine`: `llama_decode` through llama-cpp-python's plain bindings, and an argmax for each row.

Runs in the environment that setup.sh made:  PEERS/llama.cpp/bin/python -m benchmarks.peers.llama_cpp OPTIONS
"""

from __future__ import annotations

import importlib
import time
from typing import Any

from benchmarks.peers.protocol import Job, Options, prompt_tokens, serve

_BATCH_TOKENS = 512  # llama.cpp's own default for one pass over a prompt


class LlamaCpp:
    def __init__(self, options: Options) -> None:
        self._api: Any = importlib.import_module("llama_cpp")
        self._numpy: Any = importlib.import_module("numpy")
        self.version: str = self._api.__version__
        self.dtype = options.dtype
        self._options = options
        self._api.llama_backend_init()
        params = self._api.llama_model_default_params()
        self._model = self._api.llama_model_load_from_file(options.model.encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {options.model}")
        self._context: Any = None
        self._memory: Any = None
        self._batch = self._api.llama_batch_init(max(_BATCH_TOKENS, options.max_sequences), 0, 1)
        self._job = Job("", 0, 0, 0)
        self._position = 0
        self._next: list[int] = []
        self._number = 0

    def prepare(self, job: Job) -> None:
        """A context of its own for each job: llama.cpp's attention reads all that a context has room for."""
        self._job = job
        if job.bench == "prefill":
            self._open(1, job.context + job.batch + 16)
            if job.context:
                self._fill(self._prompt(job.context), 0, 0)
            self.measure(1)
            return
        self._open(job.batch, job.batch * (job.context + job.steps + 64))
        self._next = [self._fill(self._prompt(job.context - 1), 0, sequence) for sequence in range(job.batch)]
        self._position = job.context - 1

    def measure(self, repeats: int) -> list[float]:
        times = []
        for _ in range(repeats):
            if self._job.bench == "prefill":
                self._api.llama_memory_seq_rm(self._memory, 0, self._job.context, -1)
                prompt = self._prompt(self._job.batch)
                started = time.perf_counter()
                self._fill(prompt, self._job.context, 0)
            else:
                started = time.perf_counter()
                self._step()
            times.append(time.perf_counter() - started)
        return times

    def release(self) -> None:
        if self._context is not None:
            self._api.llama_free(self._context)
            self._context = None

    def first(self, prompt: list[int]) -> int:
        self._open(1, len(prompt) + 16)
        token = self._fill(prompt, 0, 0)
        self.release()
        return token

    def _open(self, sequences: int, tokens: int) -> None:
        params = self._api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = tokens, sequences
        params.n_batch = params.n_ubatch = max(_BATCH_TOKENS, sequences)
        params.n_threads = params.n_threads_batch = self._options.threads
        self._context = self._api.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {tokens} tokens for {sequences} sequences")
        self._memory = self._api.llama_get_memory(self._context)

    def _prompt(self, length: int) -> list[int]:
        self._number += 1
        return prompt_tokens(self._number, length, self._options.vocab_size)

    def _fill(self, tokens: list[int], start: int, sequence: int) -> int:
        """Compute a prompt of one sequence; returns the best next token."""
        row = 0
        for first in range(0, len(tokens), _BATCH_TOKENS):
            part = tokens[first : first + _BATCH_TOKENS]
            is_last = first + len(part) == len(tokens)
            for row, token in enumerate(part):
                self._put(row, token, start + first + row, sequence, wanted=is_last and row == len(part) - 1)
            self._decode(len(part))
        return self._best(row)

    def _step(self) -> None:
        for sequence, token in enumerate(self._next):
            self._put(sequence, token, self._position, sequence, wanted=True)
        self._decode(len(self._next))
        self._next = [self._best(row) for row in range(len(self._next))]
        self._position += 1

    def _put(self, row: int, token: int, position: int, sequence: int, *, wanted: bool) -> None:
        batch = self._batch
        batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, position, 1
        batch.seq_id[row][0], batch.logits[row] = sequence, wanted

    def _decode(self, rows: int) -> None:
        self._batch.n_tokens = rows
        code = self._api.llama_decode(self._context, self._batch)
        if code:
            raise RuntimeError(f"llama_decode said {code}")

    def _best(self, row: int) -> int:
        logits = self._api.llama_get_logits_ith(self._context, row)
        values = self._numpy.ctypeslib.as_array(logits, shape=(self._options.vocab_size,))
        return int(values.argmax())


if __name__ == "__main__":
    serve("llama.cpp", LlamaCpp)
