"""How many tokens the coordinator streams: a cluster of fake runners under `kvrelay up`, and many clients that only count.

One core for the coordinator, the others (or the same, if there is no other) for the decode worker and the clients. Prompts
are short and every token is the same whole word, so that each token is one event.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from tokenizers import Tokenizer

from benchmarks.topologies.running import Place, started
from benchmarks.topologies.server_process import ServerProcess
from benchmarks.topologies.spec import Kvrelay

_ALL_STREAM_S = 60.0
_STEP_S = 0.01  # of the fake decode worker: what it offers is far above what one core streams
_LEAD_IN_S = 2.0
_MAX_TOKENS = 3000
_SERVED_MODEL = "fake"


@dataclass(frozen=True, slots=True)
class StreamRate:
    tokens_per_s: float  # that reached the clients
    tokens_per_cpu_s: float  # of the coordinator's own time on its core
    cpu_share: float  # of that core


def stream_rate(model: Path, clients: int, seconds: float, cores: list[int]) -> StreamRate:
    """
    Raises:
        RuntimeError: not all clients were streamed to.
        TopologyFailed: the cluster did not come up.
    """
    before = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as folder:
        place = Place(model, {}, cores, {**os.environ, "XDG_RUNTIME_DIR": folder}, Path(folder))
        try:
            return asyncio.run(_measure(_topology(clients, len(cores)), place, clients, seconds))
        finally:
            os.sched_setaffinity(0, before)


def _topology(clients: int, num_cores: int) -> Kvrelay:
    rest = ",".join(str(position) for position in range(1, num_cores)) or "0"
    return Kvrelay(
        name="streaming",
        title="a coordinator on a core of its own",
        prefill=1,
        decode=1,
        policy="never",
        prefill_cpus=rest,
        decode_cpus=rest,
        coordinator_cpus="0",
        settings={
            "runner": "fake",
            "served_model": _SERVED_MODEL,
            "fake_step_s": _STEP_S,
            "max_num_sequences": clients + 8,
            "max_batched_tokens": max(512, clients + 8),
            "num_blocks": 2 * clients * (_MAX_TOKENS // 64 + 2),
            "block_size": 64,
        },
    )


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


async def _measure(topology: Kvrelay, place: Place, clients: int, seconds: float) -> StreamRate:
    async with started(topology, place, topology.name) as running:
        assert running.process is not None
        os.sched_setaffinity(0, place.cpus[1:] or place.cpus)  # the clients; the cluster's processes have their own
        return await _count(running.target.url, running.process, place.model_dir, clients, seconds)


async def _count(url: str, cluster: ServerProcess, model: Path, clients: int, seconds: float) -> StreamRate:
    address = urlsplit(url)
    token_id = Tokenizer.from_file(str(model / "tokenizer.json")).encode(" the", add_special_tokens=False).ids[0]
    body = {
        "model": _SERVED_MODEL,
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
        _, counter = await loop.create_connection(
            partial(_Counter, request), address.hostname or "127.0.0.1", address.port or 80
        )
        counters.append(counter)
    deadline = loop.time() + _ALL_STREAM_S
    while any(counter.events < 2 for counter in counters):
        if loop.time() >= deadline:
            silent = [counter for counter in counters if counter.events < 2]
            raise RuntimeError(f"{len(silent)} of {clients} clients got no tokens; one was answered {silent[0].status!r}")
        await asyncio.sleep(0.05)
    await asyncio.sleep(_LEAD_IN_S)
    events, cpu_s, began = sum(counter.events for counter in counters), cluster.cpu_s(), loop.time()
    await asyncio.sleep(seconds)
    spent = loop.time() - began
    tokens = sum(counter.events for counter in counters) - events
    used_s = cluster.cpu_s()["coordinator"] - cpu_s["coordinator"]
    return StreamRate(tokens / spent, tokens / used_s, used_s / spent)
