"""The shell around the supervisor, with real processes, signals and sockets; the processes only pretend to serve."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster.child_process import ProcessSpec
from cluster.control_socket import Done, ScaleRequest, ask
from cluster.errors import ClusterError, ClusterNotFound, StartFailed
from cluster.local_cluster import LocalCluster
from cluster.run_directory import find_cluster, run_directory, running_clusters
from cluster.supervisor import RestartPolicy
from service_kit.lifecycle import Lifecycle
from wire.control import Role

ROOT = Path(__file__).parents[3]
POLICY = RestartPolicy(first_backoff_s=0.05, max_backoff_s=0.2, start_s=15.0, stop_s=1.5)

WORKER = """
import signal, sys
from service_kit.notify import notify
signal.signal(signal.SIGTERM, lambda *_: (print("drained", flush=True), sys.exit(0)))
print("up", flush=True)
notify("READY=1")
while True:
    signal.pause()
"""

COORDINATOR = """
import http.server, signal, sys, threading
from service_kit.notify import notify

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *arguments):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
notify("READY=1")
server.serve_forever()
server.server_close()
print("drained", flush=True)
"""

FAILING = "import sys; print('no such model', flush=True); sys.exit(3)"
STUBBORN = WORKER.replace('(print("drained", flush=True), sys.exit(0))', "None")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Running:
    """A cluster that runs in this test's loop."""

    def __init__(self, directory: Path, port: int, decode: int, programs: dict[str, str], environ: dict[str, str]) -> None:
        self.lines: list[tuple[str, str]] = []
        self.reports: list[str] = []
        self.up = asyncio.Event()
        self.port = port
        self.environ = environ
        self.cluster = LocalCluster(
            directory=directory,
            port=port,
            url=f"http://127.0.0.1:{port}",
            desired={Role.PREFILL: 1, Role.DECODE: decode},
            policy=POLICY,
            spec_of=lambda name: self._spec(name, programs),
            on_line=lambda name, line: self.lines.append((name, line)),
            on_report=self.reports.append,
            on_up=self.up.set,
        )
        self.lifecycle = Lifecycle(drain_s=20)
        self.task = asyncio.create_task(self.lifecycle._supervise(self.cluster.run))

    def _spec(self, name: str, programs: dict[str, str]) -> ProcessSpec:
        program = programs.get(name, COORDINATOR if name == "coordinator" else WORKER)
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        return ProcessSpec((sys.executable, "-c", program, str(self.port)), environ)

    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self.cluster._children.items()}

    async def scale(self, **counts: int) -> tuple[Done, list[str]]:
        told: list[str] = []
        record = find_cluster(self.port, self.environ)
        return await ask(Path(record.control), ScaleRequest(**counts, deadline_s=15.0), told.append), told

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(15):
            while not condition():
                await asyncio.sleep(0.02)


@asynccontextmanager
async def running(tmp_path: Path, decode: int = 1, **programs: str) -> AsyncIterator[Running]:
    tmp_path.chmod(0o700)
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    port = free_port()
    with run_directory(port, environ) as directory:
        cluster = Running(
            directory, port, decode, {name.replace("_", "-"): text for name, text in programs.items()}, environ
        )
        try:
            yield cluster
        finally:
            cluster.lifecycle.request_stop("the test is over")
            await asyncio.wait([cluster.task], timeout=20)
            assert cluster.task.done()
            assert cluster.pids() == {}
    assert list(tmp_path.iterdir()) == [], "the run directory is still there"


async def test_a_cluster_comes_up_scales_and_goes_down(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        # 1. Up: every process is ready and /ready answers.
        async with asyncio.timeout(15):
            await cluster.up.wait()
        assert set(cluster.pids()) == {"coordinator", "prefill-0", "decode-0"}
        # 2. Other commands find it.
        (record,) = running_clusters(cluster.environ)
        assert (record.port, record.pid) == (cluster.port, os.getpid())
        # 3. Scale out and in; the client is told what happens and when it is done.
        done, told = await cluster.scale(decode=3)
        assert done.text == "1 prefill and 3 decode workers are ready"
        assert "starting decode-2" in told
        assert {"decode-1", "decode-2"} <= set(cluster.pids())
        done, told = await cluster.scale(prefill=0, decode=2)
        assert "draining decode-2" in told
        assert set(cluster.pids()) == {"coordinator", "decode-0", "decode-1"}
        # 4. What cannot be is refused.
        for counts in ({"decode": 0}, {"prefill": -1}, {"decode": 1000}):
            with pytest.raises(ClusterError, match="must be from"):
                await cluster.scale(**counts)
        # 5. Down: workers drained before the coordinator, exit code 0.
        cluster.lifecycle.request_stop("done")
        assert await cluster.task == 0
        drained = [name for name, line in cluster.lines if line == "drained"]
        assert sorted(drained) == ["coordinator", "decode-0", "decode-1", "decode-2", "prefill-0"]
        assert drained[-1] == "coordinator"


async def test_a_worker_and_the_coordinator_come_back_after_kill_9(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        await cluster.until(cluster.up.is_set)
        for name in ("decode-0", "coordinator"):
            before = cluster.pids()[name]
            os.kill(before, signal.SIGKILL)
            await cluster.until(lambda name=name, before=before: cluster.pids().get(name, before) != before)  # type: ignore[misc]
            await cluster.until(lambda name=name: f"{name} is ready again" in cluster.reports)  # type: ignore[misc]


async def test_a_failed_start_ends_everything_and_says_why(tmp_path: Path) -> None:
    async with running(tmp_path, decode_0=FAILING) as cluster:
        with pytest.raises(StartFailed, match="decode-0 ended with code 3"):
            await cluster.task
        assert ("decode-0", "no such model") in cluster.lines
        assert not cluster.up.is_set()


async def test_a_program_that_cannot_be_run_is_a_failed_start(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster:
        cluster.cluster._spec_of = lambda name: ProcessSpec(("/nowhere/python",), {})
        with pytest.raises(StartFailed, match="ended with code 127"):
            await cluster.task


async def test_a_worker_that_will_not_drain_is_killed_at_its_deadline(tmp_path: Path) -> None:
    async with running(tmp_path, decode_0=STUBBORN) as cluster:
        await cluster.until(cluster.up.is_set)
        cluster.lifecycle.request_stop("done")
        assert await cluster.task == 0
        assert any("decode-0 has not ended after 1.5 s" in report for report in cluster.reports)


async def test_a_second_signal_kills(tmp_path: Path) -> None:
    async with running(tmp_path, decode_0=STUBBORN) as cluster:
        await cluster.until(cluster.up.is_set)
        cluster.lifecycle._on_signal(signal.SIGINT)
        await asyncio.sleep(0.1)
        cluster.lifecycle._on_signal(signal.SIGINT)
        assert await cluster.task == 130


async def test_a_cluster_that_is_gone_is_not_found(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with pytest.raises(ClusterNotFound, match="kvrelay up"):
        find_cluster(None, environ)
    with pytest.raises(ClusterNotFound):
        await ask(tmp_path / "control.sock", ScaleRequest(), lambda text: None)
    assert list(tmp_path.iterdir()) == []
