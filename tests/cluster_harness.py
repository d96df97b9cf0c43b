"""A real cluster for tests: the coordinator's placement half in this process, workers as processes of their own.

Token ids go in and come out, so that outputs are compared token for token, without the detour over text.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from coordinator.control_hub import ControlHub
from coordinator.dispatcher import Dispatcher
from coordinator.generation import Generation, Placement, Policy
from coordinator.placement_settings import PlacementSettings
from transport.base import Transport
from transport.curve import keys_of
from transport.options import TransportOptions
from transport.registry import create_transport
from wire.control import WorkerLoad
from wire.ids import new_incarnation, new_request_id
from wire.sequence import SamplingParams, SequenceSpec, StopRules

ROOT = Path(__file__).resolve().parent.parent
READY_S = 60.0
HEARTBEAT_S = 0.1
STOP_S = 20.0


class WorkerProcess:
    """One `prefill_service` or `decode_service`; its log goes to a file that a failing test can show."""

    def __init__(self, role: str, index: int, environ: dict[str, str], log_dir: Path) -> None:
        self.role = role
        self.name = f"{role}-{index}"
        self.environ = environ
        self.log_path = log_dir / f"{self.name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        variables = {name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_")}
        variables |= {"OMP_NUM_THREADS": "1", "KVRELAY_WORKER_ID": self.name, **self.environ}
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(self.command(), cwd=ROOT, env=variables, stdout=log, stderr=log)

    def command(self) -> list[str]:
        return [sys.executable, "-m", f"{self.role}_service"]

    def send_signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, timeout_s: float = STOP_S) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""


class Cluster:
    def __init__(self, dispatcher: Dispatcher, workers: list[WorkerProcess], model_dir: Path) -> None:
        self.dispatcher = dispatcher
        self.workers = {worker.name: worker for worker in workers}
        self.model_dir = model_dir
        self.fallbacks: list[Placement] = []  # of sequences that `generate` saw placed otherwise than asked

    async def submit(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        policy: Policy | None = None,
        sampling: SamplingParams | None = None,
        stop: StopRules | None = None,
        cache_salt: str = "",
    ) -> Generation:
        spec = SequenceSpec(
            new_request_id(),
            tuple(prompt),
            sampling or SamplingParams(seed=0, temperature=0.0),
            stop or StopRules(max_tokens=max_tokens),
            cache_salt=cache_salt,
        )
        return await self.dispatcher.submit(spec, policy)

    async def generate(self, prompt: Sequence[int], **options: object) -> list[int]:
        """Output token ids of one sequence, to its end."""
        generation = await self.submit(prompt, **options)  # type: ignore[arg-type]
        tokens = [token.token_id async for batch in generation for token in batch.tokens]
        placement = generation.placement
        if placement is not None and placement.fallback is not None:
            self.fallbacks.append(placement)
        return tokens

    def logs(self, characters: int = 3000) -> str:
        """The end of every worker's log."""
        return "\n".join(f"--- {worker.name}\n{worker.log()[-characters:]}" for worker in self.workers.values())

    def load(self, worker: str) -> WorkerLoad:
        (found,) = [row for row in self.dispatcher.cluster()["workers"] if row["id"] == worker and row["state"] == "ready"]  # type: ignore[attr-defined]
        return WorkerLoad(**found["load"])

    def ready_workers(self) -> set[str]:
        return {row["id"] for row in self.dispatcher.cluster()["workers"] if row["state"] == "ready"}  # type: ignore[attr-defined]

    async def wait_ready(self, names: set[str] | None = None, timeout_s: float = READY_S) -> None:
        """Until all these workers take requests, and every P is linked to every D."""
        wanted = set(self.workers) if names is None else names
        await self._wait(lambda: wanted <= self.ready_workers(), timeout_s, lambda: f"ready: {self.ready_workers()}")

    async def assert_empty(self, timeout_s: float = 5.0) -> None:
        """Everything empty: no request anywhere, every block free or cached, on every worker that is there.

        Afterwards `load` is as new as this call.
        """

        def held() -> dict[str, WorkerLoad]:
            loads = {name: self.load(name) for name in self.ready_workers()}
            return {
                name: load
                for name, load in loads.items()
                if load.waiting or load.running or load.reserved or load.exporting or load.blocks_held
                or load.blocks_free + load.blocks_cached != load.blocks_total
            }  # fmt: skip

        await asyncio.sleep(2.5 * HEARTBEAT_S)
        await self._wait(lambda: not held(), timeout_s, lambda: f"still held: {held()}")
        assert self.dispatcher.holds_nothing()

    async def _wait(self, condition: object, timeout_s: float, describe: object) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():  # type: ignore[operator]
            if time.monotonic() > deadline:
                raise AssertionError(f"{describe()} after {timeout_s} s\n{self.logs()}")  # type: ignore[operator]
            await asyncio.sleep(0.05)


@asynccontextmanager
async def running_cluster(
    model_dir: Path,
    log_dir: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    transport: str = "zmq",
    policy: Policy = "always",
    settings: dict[str, object] | None = None,
    environ: dict[str, str] | None = None,
    encrypted_by: str = "",
) -> AsyncIterator[Cluster]:
    """Start, wait until everything is ready, and at the end stop every worker by SIGTERM and see it leave well.

    Args:
        encrypted_by: a cluster token; with one, every TCP link is encrypted.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    options = TransportOptions()
    if encrypted_by:
        keys = keys_of(encrypted_by)
        options = TransportOptions(curve_server_secret=keys.secret, curve_server_public=keys.public)
        environ = {"KVRELAY_ENCRYPT": "true", "KVRELAY_CLUSTER_TOKEN": encrypted_by, **(environ or {})}
    control: Transport = create_transport("zmq", options)
    placement = PlacementSettings(
        policy=policy,
        heartbeat_interval_s=HEARTBEAT_S,
        cluster_token=encrypted_by,
        **(settings or {}),  # type: ignore[arg-type]
    )
    dispatcher = Dispatcher(placement, new_incarnation())
    hub = ControlHub(control, dispatcher)
    workers: list[WorkerProcess] = []
    try:
        address = await hub.listen("tcp://127.0.0.1:0")
        dispatcher.start()
        variables = {
            "KVRELAY_COORDINATOR": address,
            "KVRELAY_MODEL_DIR": str(model_dir),
            "KVRELAY_TRANSPORT": transport.partition("-")[0],
            "KVRELAY_LOG_FORMAT": "human",
            "KVRELAY_KV_MEMORY": "64MiB",
            **(environ or {}),
        }
        if transport == "zmq-ipc":
            variables["KVRELAY_DECODE_LISTEN"] = f"zmq=ipc://{log_dir}/handoff.sock"
        workers += [WorkerProcess("prefill", index, variables, log_dir) for index in range(prefill)]
        workers += [WorkerProcess("decode", index, variables, log_dir) for index in range(decode)]
        for worker in workers:
            worker.start()
        cluster = Cluster(dispatcher, workers, model_dir)
        await cluster.wait_ready()
        yield cluster
        for worker in workers:
            if worker.process is not None and worker.process.poll() is None:
                worker.send_signal(signal.SIGCONT)
                worker.send_signal(signal.SIGTERM)
        for worker in workers:
            if worker.process is not None and worker.process.returncode != -signal.SIGKILL:
                code = await asyncio.to_thread(worker.wait)
                assert code == 0, f"{worker.name} ended with {code}:\n{worker.log()[-3000:]}"
    finally:
        for worker in workers:
            if worker.process is not None and worker.process.poll() is None:
                worker.kill()
        await dispatcher.close()
        await hub.close()
        await control.close()
