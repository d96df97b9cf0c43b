"""How `bench_engine` speaks with the process of one engine: a line of JSON in, a line of JSON out.

    hello       {"engine": …, "version": …, "dtype": …}     once, unasked, when the engine is ready
    prepare     a Job                -> {}                   fills the KV cache for it
    measure     {"repeats": n}       -> {"times": [s, …]}    n decode steps, or n prompts, of the job that was prepared
    release     -> {}                                        lets go of its sequences
    first       {"prompt": [id, …]}  -> {"token": id}        the best next token: do two engines run the same model?
    machine     -> {"bytes_per_s": …, "operations_per_s": …}
    quit

An error answers {"error": text}. Standard library only: engines run it in environments of their own. What an engine prints
goes to stderr, whatever it is.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Options:
    """What an engine's process is started with.

    Args:
        model: a directory with config.json and safetensors; for llama.cpp a GGUF file.
        cores: the process is pinned to them, and uses as many threads.
        max_model_len: tokens of the longest sequence.
        kv_bytes: KV of the largest job, over all its sequences.
        kernels: of kvrelay alone.
    """

    model: str
    dtype: str
    cores: list[int]
    max_model_len: int
    max_sequences: int
    kv_bytes: int
    vocab_size: int
    kernels: str = "auto"

    @property
    def threads(self) -> int:
        return len(self.cores)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Job:
    """One figure. decode: `batch` sequences with `context` tokens in the KV cache; prefill: a prompt of `batch` tokens
    behind `context` cached ones. `steps` is how many will be measured in all."""

    bench: str
    batch: int
    context: int
    steps: int


class Engine(Protocol):
    version: str
    dtype: str  # of the weights, as they are held

    def prepare(self, job: Job) -> None: ...

    def measure(self, repeats: int) -> list[float]: ...

    def release(self) -> None: ...

    def first(self, prompt: list[int]) -> int: ...


def prompt_tokens(number: int, length: int, vocab_size: int) -> list[int]:
    """Another prompt for each number, the same one in every engine, so that no prefix is found that was not asked for."""
    return [(number * 7919 + index * 31) % (vocab_size - 10) + 5 for index in range(length)]


def serve(name: str, make: Callable[[Options], Engine]) -> None:
    """Run one engine until `quit` or the end of stdin. The options are the first argument; threads are limited and the
    process pinned before `make` imports anything heavy."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    options = Options(**json.loads(sys.argv[1]))
    os.sched_setaffinity(0, options.cores)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")

    engine = make(options)
    answer({"engine": name, "version": engine.version, "dtype": engine.dtype})
    for line in sys.stdin:
        message = json.loads(line)
        what = message.pop("do")
        if what == "quit":
            return
        try:
            answer(_answer(engine, what, message))
        except Exception as error:  # told to the one who asked; what it means is theirs to say
            answer({"error": f"{type(error).__name__}: {error}"})


def _answer(engine: Engine, what: str, message: dict[str, Any]) -> dict[str, Any]:
    match what:
        case "prepare":
            engine.prepare(Job(**message))
            return {}
        case "measure":
            return {"times": engine.measure(message["repeats"])}
        case "release":
            engine.release()
            return {}
        case "first":
            return {"token": engine.first(message["prompt"])}
        case "machine":
            return dict(getattr(engine, "machine")())  # noqa: B009 - one engine alone has it
    raise ValueError(f"there is no {what!r}")
