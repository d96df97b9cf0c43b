"""One P, one D and a coordinator under chaos: slow on purpose, with faults that can be armed while it runs.

The dispatcher runs in this process, so that a test can see in which state a request is; workers are real processes, and one
that has ended is started again at once, as `kvrelay up` does.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from chaos_network import Loopback, Network, make_network
from cluster_harness import Cluster, WorkerProcess
from fake_reference import fake_model_dir

from coordinator.control_hub import ControlHub
from coordinator.dispatcher import Dispatcher
from coordinator.placement_settings import PlacementSettings
from transport.options import TransportOptions
from transport.registry import create_transport
from wire.control import WorkerLoad
from wire.ids import new_incarnation

BLOCK = 16
CHUNK = 64
PREFILL_BLOCKS = 320
DECODE_BLOCKS = 64
PREFILL_STEP_S = 0.05
DECODE_STEP_S = 0.03
LEASE_S = 2.0
TOKEN = "chaos"

PLACEMENT = PlacementSettings(
    policy="always",
    heartbeat_interval_s=0.1,
    lease_s=LEASE_S,
    reserve_timeout_s=6.0,
    prefill_timeout_s=6.0,
    transfer_timeout_s=4.0,
    decode_stall_timeout_s=4.0,
    handoff_lease_s=10.0,
    failover_wait_s=15.0,
    cluster_token=TOKEN,
)


class ChaosWorker(WorkerProcess):
    """A worker behind its cables, with a file of faults."""

    def __init__(self, role: str, network: Network, environ: dict[str, str], directory: Path) -> None:
        self.faults_path = directory / f"{role}.faults"
        super().__init__(role, 0, {**environ, "KVRELAY_FAULTS_FILE": str(self.faults_path)}, directory)
        self._network = network

    def command(self) -> list[str]:
        return [*self._network.command(self.role), *super().command()]

    def arm(self, *rules: str) -> None:
        """These faults and no others, from the next message on."""
        fresh = self.faults_path.with_suffix(".fresh")
        fresh.write_text("\n".join(rules))
        fresh.rename(self.faults_path)

    def strikes(self, rule: str) -> int:
        """How often this rule has struck so far."""
        return self.log().count(f"fault: {rule}\n")


class Coordinator:
    """The placement half, in this process."""

    def __init__(self, host: str) -> None:
        self._transport = create_transport("zmq", TransportOptions())
        self._address = f"tcp://{host}:0"
        self.dispatcher = Dispatcher(PLACEMENT, new_incarnation())
        self._hub = ControlHub(self._transport, self.dispatcher)

    async def start(self) -> int:
        """Returns the port that workers register at."""
        self._address = await self._hub.listen(self._address)
        self.dispatcher.start()
        return int(self._address.rpartition(":")[2])

    async def replace(self) -> None:
        await self._hub.close()
        await self.dispatcher.close()
        self.dispatcher = Dispatcher(PLACEMENT, new_incarnation())
        self._hub = ControlHub(self._transport, self.dispatcher)
        await self.start()

    async def close(self) -> None:
        await self.dispatcher.close()
        await self._hub.close()
        await self._transport.close()


class ChaosCluster(Cluster):
    """See `Cluster`; here there are exactly `prefill-0` and `decode-0`."""

    def __init__(
        self, coordinator: Coordinator, workers: list[WorkerProcess], directory: Path, network: Network, transport: str
    ) -> None:
        super().__init__(coordinator.dispatcher, workers, directory)
        self._coordinator = coordinator
        self.network = network
        self.transport = transport

    async def replace_coordinator(self) -> None:
        """It is gone with everything that it knew; a successor listens where it did."""
        await self._coordinator.replace()
        self.dispatcher = self._coordinator.dispatcher

    def worker(self, role: str) -> ChaosWorker:
        worker = self.workers[f"{role}-0"]
        assert isinstance(worker, ChaosWorker)
        return worker

    def seen(self, role: str) -> WorkerLoad:
        """The last that was heard of a worker; nothing at all if it is not there."""
        return self.load(f"{role}-0") if self.is_there(role) else WorkerLoad()

    def is_there(self, role: str) -> bool:
        return f"{role}-0" in self.ready_workers()

    def is_linked(self) -> bool:
        return bool(self.dispatcher.view.usable_pairs())

    def disarm(self) -> None:
        for role in ("prefill", "decode"):
            self.worker(role).arm()

    def restart(self, role: str) -> None:
        """As a supervisor does when the process has ended."""
        self.worker(role).start()

    async def until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout_s:g} s: {what}\n{self.logs()}")
            await asyncio.sleep(0.01)


def _listen(transport: str, host: str, directory: Path) -> str:
    return {
        "zmq": f"zmq=tcp://{host}:0",
        "zmq-ipc": f"zmq=ipc://{directory}/handoff.sock",
        "shm": f"shm=tcp://{host}:0",
        "ucx": f"ucx=ucx://{host}:0",
    }[transport]


@asynccontextmanager
async def chaos_cluster(directory: Path, transport: str, *, cables: bool = False) -> AsyncIterator[ChaosCluster]:
    """
    Args:
        cables: put cables between the processes where this machine can.
    """
    directory.mkdir(parents=True, exist_ok=True)
    network = make_network() if cables else Loopback("no cables were asked for")
    coordinator = Coordinator(network.coordinator_listens)
    workers: list[WorkerProcess] = []
    try:
        port = await coordinator.start()
        environ = {
            "KVRELAY_MODEL_DIR": str(fake_model_dir(directory / "model")),
            "KVRELAY_RUNNER": "fake",
            "KVRELAY_CLUSTER_TOKEN": TOKEN,
            "KVRELAY_TRANSPORT": transport.partition("-")[0],
            "KVRELAY_BLOCK_SIZE": str(BLOCK),
            "KVRELAY_PREFILL_CHUNK": str(CHUNK),
            "KVRELAY_MAX_BATCHED_TOKENS": str(CHUNK),
            "KVRELAY_LOG_FORMAT": "human",
            "KVRELAY_DRAIN_S": "20",
        }
        prefill = environ | {
            "KVRELAY_COORDINATOR": f"tcp://{network.coordinator_seen_by_prefill}:{port}",
            "KVRELAY_NUM_BLOCKS": str(PREFILL_BLOCKS),
            "KVRELAY_FAKE_STEP_S": str(PREFILL_STEP_S),
        }
        decode = environ | {
            "KVRELAY_COORDINATOR": f"tcp://{network.coordinator_seen_by_decode}:{port}",
            "KVRELAY_NUM_BLOCKS": str(DECODE_BLOCKS),
            "KVRELAY_FAKE_STEP_S": str(DECODE_STEP_S),
            "KVRELAY_DECODE_LISTEN": _listen(transport, network.decode, directory),
        }
        workers.append(ChaosWorker("prefill", network, prefill, directory))
        workers.append(ChaosWorker("decode", network, decode, directory))
        for worker in workers:
            worker.start()
        cluster = ChaosCluster(coordinator, workers, directory, network, transport)
        await cluster.wait_ready()
        yield cluster
        for worker in workers:
            if worker.process is not None and worker.process.poll() is None:
                worker.send_signal(signal.SIGCONT)
                worker.send_signal(signal.SIGTERM)
        codes = {worker.name: await asyncio.to_thread(worker.wait) for worker in workers}
        assert set(codes.values()) == {0}, f"{codes}\n{cluster.logs()}"
    finally:
        for worker in workers:
            if worker.process is not None and worker.process.poll() is None:
                worker.kill()
        await coordinator.close()
        network.close()
