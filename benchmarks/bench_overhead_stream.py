"""How many tokens the coordinator streams: a cluster of fake runners under `kvrelay up`, and many clients that only count.

One core for the coordinator, the others (or the same, if there is no other) for the decode worker and the clients. Prompts
are short and every token is the same whole word, so that each token is one event.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from tokenizers import Tokenizer

_ROOT = Path(__file__).resolve().parent.parent
_START_S = 120.0
_STOP_S = 40.0
_ALL_STREAM_S = 60.0
_STEP_S = 0.01  # of the fake decode worker: what it offers is far above what one core streams
_LEAD_IN_S = 2.0
_MAX_TOKENS = 3000


@dataclass(frozen=True, slots=True)
class StreamRate:
    tokens_per_s: float  # that reached the clients
    tokens_per_cpu_s: float  # of the coordinator's own time on its core
    cpu_share: float  # of that core


def stream_rate(model: Path, clients: int, seconds: float, cores: list[int]) -> StreamRate:
    """
    Raises:
        RuntimeError: the cluster did not come up, or did not stream to all clients.
    """
    own, others = cores[0], cores[1:] or cores
    before = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as folder:
        with _cluster(model, Path(folder), own, others, clients) as (url, process):
            os.sched_setaffinity(0, others)
            try:
                coordinator = _coordinator(process)
                return asyncio.run(_measure(url, model, clients, seconds, coordinator))
            finally:
                os.sched_setaffinity(0, before)


@contextmanager
def _cluster(
    model: Path, folder: Path, own: int, others: list[int], clients: int
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    rest = ",".join(str(core) for core in others)
    settings = {
        "model_dir": model,
        "runner": "fake",
        "served_model": "fake",
        "fake_step_s": _STEP_S,
        "max_num_sequences": clients + 8,
        "max_batched_tokens": max(512, clients + 8),
        "num_blocks": 2 * clients * (_MAX_TOKENS // 64 + 2),
        "block_size": 64,
        "log_level": "warning",
    }
    variables = {f"KVRELAY_{name.upper()}": str(value) for name, value in settings.items()}
    said, log = folder / "out", folder / "log"
    arguments = ["--port", "0", "--policy", "never", "--coordinator-cpus", str(own)]
    arguments += ["--prefill-cpus", rest, "--decode-cpus", rest]
    with said.open("w") as out, log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "cluster.cli", "up", *arguments],
            cwd=_ROOT,
            env={**os.environ, "XDG_RUNTIME_DIR": str(folder), **variables},
            stdout=out,
            stderr=errors,
        )
    try:
        yield _url(process, said, log), process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _url(process: subprocess.Popen[bytes], said: Path, log: Path) -> str:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"ready: (http://\S+)", said.read_text()):
            return found[1]
        time.sleep(0.1)
    raise RuntimeError(f"the cluster did not come up: {log.read_text()[-2000:]}")


def _coordinator(up: subprocess.Popen[bytes]) -> psutil.Process:
    for child in psutil.Process(up.pid).children(recursive=True):
        if any(part.startswith("coordinator") for part in child.cmdline()[1:]):
            return child
    raise RuntimeError("no coordinator among the processes of the cluster")


class _Counter(asyncio.Protocol):
    """One client: sends its request, counts events, parses nothing."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.events = 0
        self.status = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.status:
            self.status = data[:12]
        self.events += data.count(b"data: {")


def _given(counter: _Counter) -> _Counter:
    return counter


async def _measure(url: str, model: Path, clients: int, seconds: float, coordinator: psutil.Process) -> StreamRate:
    address = urlsplit(url)
    token_id = Tokenizer.from_file(str(model / "tokenizer.json")).encode(" the", add_special_tokens=False).ids[0]
    body = {
        "model": "fake",
        "max_tokens": _MAX_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
        "logit_bias": {str(token_id): 100},
    }
    loop = asyncio.get_running_loop()
    counters = []
    for number in range(clients):
        text = json.dumps({**body, "prompt": [token_id, 100 + number, 7]}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
        request = f"{head}content-length: {len(text)}\r\n\r\n".encode() + text
        counter = _Counter(request)
        await loop.create_connection(partial(_given, counter), address.hostname or "127.0.0.1", address.port or 80)
        counters.append(counter)
    deadline = loop.time() + _ALL_STREAM_S
    while any(counter.events < 2 for counter in counters):
        if loop.time() >= deadline:
            silent = [counter for counter in counters if counter.events < 2]
            raise RuntimeError(f"{len(silent)} of {clients} clients got no tokens; one was answered {silent[0].status!r}")
        await asyncio.sleep(0.05)
    await asyncio.sleep(_LEAD_IN_S)
    events, cpu_s, started = sum(counter.events for counter in counters), _cpu_s(coordinator), loop.time()
    await asyncio.sleep(seconds)
    spent = loop.time() - started
    tokens, used_s = sum(counter.events for counter in counters) - events, _cpu_s(coordinator) - cpu_s
    return StreamRate(tokens / spent, tokens / used_s, used_s / spent)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
