"""Starts topologies: from a description to a URL that answers, and back to nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.errors import TopologyFailed, TopologySkipped
from benchmarks.load.client import Target, make_session, wait_until_answers
from benchmarks.topologies.server_process import ServerProcess, free_port
from benchmarks.topologies.spec import Kvrelay, Running, Server, SettingValue, Topology, real_cpus
from cluster.model_store import cache_directory
from service_kit.cpus import format_cpus, parse_cpus
from service_kit.launch import launch_command
from service_kit.settings import option_name

START_S = 180.0
STOP_S = 45.0
CHECK_S = 120.0
PREPARE_S = 1200.0
TIMELINE = {"X-Kvrelay-Timeline": "1"}


@dataclass(frozen=True, slots=True)
class Place:
    """What a topology is started with.

    Args:
        settings: of the experiment, for our own clusters.
    """

    model_dir: Path
    settings: Mapping[str, SettingValue]
    cpus: Sequence[int]
    environ: Mapping[str, str]
    logs: Path


@dataclass(frozen=True, slots=True)
class Started:
    topology: Topology
    target: Target
    command: tuple[str, ...]
    process: ServerProcess | None

    async def cluster_state(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        """GET /cluster; only our own clusters have it.

        Raises:
            TopologyFailed: it does not answer.
        """
        try:
            async with session.get(f"{self.target.url}/cluster", timeout=aiohttp.ClientTimeout(total=10)) as answer:
                state: dict[str, Any] = await answer.json()
                return state
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise TopologyFailed(f"{self.topology.name}: /cluster does not answer: {error}") from error

    async def kill_worker(self, session: aiohttp.ClientSession, worker_id: str) -> None:
        """SIGKILL to a worker's process.

        Raises:
            TopologyFailed: there is no such worker.
        """
        for worker in (await self.cluster_state(session))["workers"]:
            if worker["id"] == worker_id and worker["state"] == "ready":
                os.kill(int(worker["pid"]), signal.SIGKILL)
                return
        raise TopologyFailed(f"{self.topology.name}: there is no ready worker {worker_id} to kill")

    async def wait_until_whole(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        """Until nothing is outstanding and every worker is there and ready (again).

        Raises:
            TopologyFailed
        """
        if not isinstance(self.topology, Kvrelay):
            return
        deadline = asyncio.get_running_loop().time() + timeout_s
        wanted = self.topology.prefill + self.topology.decode
        while True:
            state = await self.cluster_state(session)
            ready = sum(worker["state"] == "ready" for worker in state["workers"])
            if ready == wanted and not state["outstanding"]:
                return
            if asyncio.get_running_loop().time() >= deadline:
                raise TopologyFailed(
                    f"{self.topology.name}: {ready} of {wanted} workers are ready and {state['outstanding']} sequences "
                    f"outstanding after {timeout_s:g} s"
                )
            await asyncio.sleep(0.2)


@asynccontextmanager
async def started(topology: Topology, place: Place, log_name: str) -> AsyncIterator[Started]:
    """The topology for the length of the block.

    Raises:
        TopologySkipped: it cannot run here.
        TopologyFailed: it did not come up.
    """
    port = free_port()
    if isinstance(topology, Running):
        async with make_session() as session:
            yield Started(topology, await _target(session, topology, topology.url.rstrip("/"), place), (), None)
        return
    command, environ = start_command(topology, place, port)
    start_s = topology.start_s if isinstance(topology, Server) else START_S
    ready = topology.ready if isinstance(topology, Server) else "/ready"
    process = await ServerProcess.start(command, environ, place.logs / f"{log_name}.log")
    url = f"http://127.0.0.1:{port}"
    try:
        async with make_session() as session:
            try:
                deadline = asyncio.get_running_loop().time() + start_s
                await wait_until_answers(session, url + ready, deadline, process.death)
            except TimeoutError as error:
                raise TopologyFailed(f"{topology.name} did not come up: {error}") from error
            target = await _target(session, topology, url, place)
            yield Started(topology, target, shown_command(topology, command), process)
    finally:
        await asyncio.shield(process.stop(STOP_S))


def start_command(topology: Kvrelay | Server, place: Place, port: int) -> tuple[list[str], dict[str, str]]:
    """
    Raises:
        TopologySkipped: it cannot run here; the message says why.
    """
    if isinstance(topology, Kvrelay):
        command = launch_command("cluster.cli", "up", *up_arguments(topology, place, port), parent_pid=os.getpid())
        return command, dict(place.environ)
    return _server_command(topology, place, port)


def up_arguments(topology: Kvrelay, place: Place, port: int) -> list[str]:
    """The arguments of `kvrelay up`."""
    options: dict[str, SettingValue] = {
        "port": port,
        "prefill": topology.prefill,
        "decode": topology.decode,
        "policy": topology.policy,
    }
    for name in ("prefill_cpus", "decode_cpus", "coordinator_cpus"):
        if cpus := real_cpus(getattr(topology, name), place.cpus):
            options[name] = cpus
    options |= {"model_dir": str(place.model_dir), "log_format": "json", "log_level": "warning"}
    options |= {**place.settings, **topology.settings}
    arguments = []
    for name, value in options.items():
        if isinstance(value, bool):
            arguments.append(f"--{'' if value else 'no-'}{option_name(name)}")
        else:
            arguments += [f"--{option_name(name)}", str(value)]
    return arguments


def shown_command(topology: Topology, command: Sequence[str]) -> tuple[str, ...]:
    """As a person would type it."""
    if isinstance(topology, Kvrelay):
        return ("kvrelay", *command[list(command).index("cluster.cli") + 1 :])
    parts = list(command)
    return tuple(parts[parts.index("--") + 1 :]) if "--" in parts else tuple(parts)


def peer_python(topology: Server, environ: Mapping[str, str]) -> Path:
    if not topology.peer:
        return Path(sys.executable)
    return cache_directory(environ) / "peers" / topology.peer / "bin" / "python"


def _server_command(topology: Server, place: Place, port: int) -> tuple[list[str], dict[str, str]]:
    python = peer_python(topology, place.environ)
    if not python.is_file():
        raise TopologySkipped(f"its environment is not there; make it with benchmarks/peers/setup.sh {topology.peer}")
    cpus = real_cpus(topology.cpus, place.cpus)
    if topology.check:
        what = f"{topology.check} cannot be imported by {python}"
        _run_before([str(python), "-c", f"import {topology.check}"], place.environ, CHECK_S, what)
    fill = _placeholders(topology, place) | {
        "port": str(port),
        "cpus": cpus or format_cpus(place.cpus),
        "threads": str(len(parse_cpus(cpus)) or len(place.cpus)),
    }
    if topology.prepare:
        _run_before([part.format(**fill) for part in topology.prepare], place.environ, PREPARE_S, "it cannot be prepared")
    own = {name: value for name, value in place.environ.items() if not name.startswith("KVRELAY_")}
    environ = own | {name: value.format(**fill) for name, value in topology.environ.items()}
    pinned = [sys.executable, "-m", "benchmarks.topologies.pinned", "--parent-pid", str(os.getpid())]
    if cpus:
        pinned += ["--cpus", cpus]
    return [*pinned, "--", *(part.format(**fill) for part in topology.command)], environ


def _placeholders(topology: Server, place: Place) -> dict[str, str]:
    return {
        "python": str(peer_python(topology, place.environ)),
        "own_python": sys.executable,
        "model": str(place.model_dir),
        "model_name": place.model_dir.name,
        "peers": str(cache_directory(place.environ) / "peers"),
    }


def _run_before(command: Sequence[str], environ: Mapping[str, str], timeout_s: float, what: str) -> None:
    """
    Raises:
        TopologySkipped: it failed; the message ends with the last line that it wrote.
    """
    try:
        outcome = subprocess.run(command, env=dict(environ), capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TopologySkipped(f"{what}: {error}") from error
    if outcome.returncode != 0:
        last = (outcome.stderr.strip().splitlines() or ["no output"])[-1]
        raise TopologySkipped(f"{what}: {last}")


async def _target(session: aiohttp.ClientSession, topology: Topology, url: str, place: Place) -> Target:
    """Ask the server what its model is called, unless the description says so."""
    if isinstance(topology, Kvrelay):
        return Target(url, await _first_model(session, topology, url), body={"ignore_eos": True}, headers=TIMELINE)
    model = topology.model_name or await _first_model(session, topology, url)
    if isinstance(topology, Server):
        model = model.format(**_placeholders(topology, place))
    return Target(url, model, topology.endpoint, topology.body, {}, topology.stream_usage)


async def _first_model(session: aiohttp.ClientSession, topology: Topology, url: str) -> str:
    try:
        async with session.get(f"{url}/v1/models", timeout=aiohttp.ClientTimeout(total=10)) as answer:
            return str((await answer.json())["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, IndexError) as error:
        raise TopologyFailed(f"{topology.name}: /v1/models does not name a model: {error!r}") from error
