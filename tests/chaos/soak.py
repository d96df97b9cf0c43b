"""Many requests, random cancels, and a worker killed again and again: nothing wrong, nothing lost, nothing leaked.

    PYTHONPATH=.:tests .venv/bin/python tests/chaos/soak.py --requests 10000 --transport shm

Two P and two D with the fake runner, whose tokens depend on every byte of KV. `prefill-0` and `decode-0` are killed in turn
and started again at once; the other two live through the whole run, and their memory is watched, as is this process'.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from cluster_harness import Cluster, running_cluster
from fake_reference import fake_model_dir, reference

from coordinator.generation import GenerationError

WARM_UP = 0.3
"""The share of the run in which memory may still grow: caches fill."""
MAX_GROWTH_BYTES = 24 << 20
REQUEST_S = 60.0
SAMPLE_S = 1.0


@dataclass(frozen=True)
class Options:
    requests: int = 10_000
    at_once: int = 24
    cancel_share: float = 0.3
    cancel_within_s: float = 0.4  # of a request's beginning; one that ended before is none
    kill_every_s: float = 20.0
    transport: str = "shm"
    seed: int = 1
    limit_s: float = float("inf")  # no new request after that


@dataclass
class Report:
    options: Options
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # not cancelled, and no text
    fallbacks: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    memory: dict[str, list[int]] = field(default_factory=dict)  # bytes, once a second, of those that live through it
    longest_s: float = 0.0  # of one request

    def growth(self) -> dict[str, int]:
        """Bytes by which each process' memory grew behind the warm-up: median of the last fifth over that of the first."""
        found = {}
        for name, samples in self.memory.items():
            warm = samples[int(len(samples) * WARM_UP) :]
            part = max(1, len(warm) // 5)
            found[name] = round(statistics.median(warm[-part:]) - statistics.median(warm[:part])) if warm else 0
        return found

    def summary(self) -> dict[str, object]:
        return {
            "options": asdict(self.options),
            "seconds": round(self.seconds, 1),
            "requests": sum(self.ends.values()),
            "ends": dict(self.ends),
            "wrong": self.wrong,
            "failed": self.failed,
            "fallbacks": dict(self.fallbacks),
            "kills": dict(self.kills),
            "longest_s": round(self.longest_s, 2),
            "memory_MiB": {name: round(samples[-1] / 2**20, 1) for name, samples in self.memory.items() if samples},
            "growth_MiB": {name: round(grown / 2**20, 2) for name, grown in self.growth().items()},
        }


async def soak(directory: Path, options: Options) -> Report:
    """
    Raises:
        AssertionError: something is still held when all has ended.
    """
    report = Report(options)
    environ = {
        "KVRELAY_RUNNER": "fake",
        "KVRELAY_BLOCK_SIZE": "16",
        "KVRELAY_PREFILL_CHUNK": "64",
        "KVRELAY_NUM_BLOCKS": "512",
        "KVRELAY_FAKE_STEP_S": "0.002",
    }
    async with running_cluster(
        fake_model_dir(directory / "model"),
        directory / "logs",
        prefill=2,
        decode=2,
        transport=options.transport,
        environ=environ,
        settings={"lease_s": 3.0, "failover_wait_s": 30.0},
    ) as cluster:
        started = time.monotonic()
        helpers = [
            asyncio.create_task(_kill_in_turn(cluster, options, report)),
            asyncio.create_task(_watch_memory(cluster, report)),
        ]
        numbers = iter(range(options.requests))

        async def one_after_the_other() -> None:
            for number in numbers:
                if time.monotonic() - started > options.limit_s:
                    return
                await _request(cluster, options, report, number)

        try:
            await asyncio.gather(*(one_after_the_other() for _ in range(options.at_once)))
        finally:
            report.seconds = time.monotonic() - started
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
        await cluster.wait_ready()
        await cluster.assert_empty(timeout_s=20.0)
    return report


async def _request(cluster: Cluster, options: Options, report: Report, number: int) -> None:
    rng = random.Random(f"{options.seed} {number}")
    prompt = [rng.randrange(256) for _ in range(rng.choice((20, 100, 300, 600)) + rng.randrange(64))]
    max_tokens = rng.randrange(1, 60)
    cancelled = rng.random() < options.cancel_share
    tokens: list[int] = []
    error: GenerationError | None = None
    started = time.monotonic()
    try:
        async with asyncio.timeout(REQUEST_S):
            generation = await cluster.submit(prompt, max_tokens=max_tokens)
            if cancelled:
                asyncio.get_running_loop().call_later(rng.random() * options.cancel_within_s, generation.cancel)
            async for batch in generation:
                tokens += [token.token_id for token in batch.tokens]
            if generation.placement is not None and generation.placement.fallback is not None:
                report.fallbacks[generation.placement.fallback] += 1
    except GenerationError as failure:
        error = failure
    except TimeoutError:
        report.failed.append(f"request {number}: no end within {REQUEST_S:g} s")
        report.ends["hung"] += 1
        return
    report.longest_s = max(report.longest_s, time.monotonic() - started)
    expected = reference(prompt, max_tokens)
    # A cancel drops what was not read yet, also of a sequence that has just ended.
    if tokens != (expected[: len(tokens)] if error is not None or cancelled else expected):
        report.wrong.append(f"request {number}: {tokens} for {expected}")
    if error is None:
        report.ends["text"] += 1
    elif cancelled and error.status == 499:
        report.ends["cancelled"] += 1
    else:
        report.ends[f"{error.status} {error.code}"] += 1
        report.failed.append(f"request {number}: {error.status} {error.code}: {error.message}")


async def _kill_in_turn(cluster: Cluster, options: Options, report: Report) -> None:
    while True:
        for name in ("prefill-0", "decode-0"):
            await asyncio.sleep(options.kill_every_s)
            cluster.workers[name].kill()
            cluster.workers[name].start()
            report.kills[name] += 1


async def _watch_memory(cluster: Cluster, report: Report) -> None:
    watched = {"coordinator": psutil.Process()}
    for name in ("prefill-1", "decode-1"):
        process = cluster.workers[name].process
        assert process is not None
        watched[name] = psutil.Process(process.pid)
    while True:
        for name, process_info in watched.items():
            report.memory.setdefault(name, []).append(process_info.memory_info().rss)
        await asyncio.sleep(SAMPLE_S)


def failures(report: Report) -> list[str]:
    """What should not have been; nothing in a good run."""
    grown = {name: grown for name, grown in report.growth().items() if grown > MAX_GROWTH_BYTES}
    return [
        *(f"wrong text: {text}" for text in report.wrong),
        *(f"failed: {text}" for text in report.failed),
        *(f"memory of {name} grew by {nbytes >> 20} MiB" for name, nbytes in grown.items()),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Requests, cancels and kills for as long as you like.")
    parser.add_argument("--requests", type=int, default=Options.requests)
    parser.add_argument("--at-once", type=int, default=Options.at_once)
    parser.add_argument("--cancel-share", type=float, default=Options.cancel_share)
    parser.add_argument("--cancel-within-s", type=float, default=Options.cancel_within_s)
    parser.add_argument("--kill-every-s", type=float, default=Options.kill_every_s)
    parser.add_argument("--transport", choices=("zmq", "zmq-ipc", "shm", "ucx"), default=Options.transport)
    parser.add_argument("--seed", type=int, default=Options.seed)
    parser.add_argument("--limit-s", type=float, default=Options.limit_s, help="no new request after so many seconds")
    with tempfile.TemporaryDirectory(prefix="kvrelay-soak-") as directory:
        report = asyncio.run(soak(Path(directory), Options(**vars(parser.parse_args()))))
    print(json.dumps(report.summary(), indent=2))
    found = failures(report)
    for line in found[:20]:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
