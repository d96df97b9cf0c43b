"""`kvrelay up` as a user runs it, for tests that speak HTTP."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
START_S = 120.0
STOP_S = 40.0


@dataclass(frozen=True)
class HttpCluster:
    url: str
    process: subprocess.Popen[bytes]
    log_path: Path

    def cluster(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/cluster", timeout=10).json()

    def workers(self) -> dict[str, dict[str, Any]]:
        """By id; ready ones alone."""
        return {row["id"]: row for row in self.cluster()["workers"] if row["state"] == "ready"}

    def assert_empty(self, timeout_s: float = 2.0) -> None:
        """Nothing outstanding at the coordinator, every block of every worker free or cached."""
        time.sleep(0.6)  # at least one heartbeat that is newer than the last request
        deadline = time.monotonic() + timeout_s
        while held := self._held():
            assert time.monotonic() < deadline, f"still held: {held}"
            time.sleep(0.1)

    def _held(self) -> list[str]:
        state = self.cluster()
        held = [f"{state['outstanding']} outstanding"] if state["outstanding"] else []
        for row in state["workers"]:
            if (load := row.get("load")) is None:
                continue  # the predecessor of a worker that was started again
            busy = load["waiting"] or load["running"] or load["reserved"] or load["exporting"] or load["blocks_held"]
            if busy or load["blocks_free"] + load["blocks_cached"] != load["blocks_total"]:
                held.append(f"{row['id']}: {load}")
        return held


def model_environ(**settings: object) -> dict[str, str]:
    return {f"KVRELAY_{name.upper()}": str(value) for name, value in settings.items()}


@contextmanager
def kvrelay_up(
    log_dir: Path,
    *arguments: str,
    environ: dict[str, str] | None = None,
    command: Sequence[str] = (sys.executable, "-m", "cluster.cli", "up"),
) -> Iterator[HttpCluster]:
    """Start, wait until it says that it is ready, and end it by Ctrl-C: it must end with 0."""
    log_dir.mkdir(parents=True, exist_ok=True)
    log_path, said_path = log_dir / "up.log", log_dir / "up.out"
    variables = {name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_UP_")}
    variables |= {"XDG_RUNTIME_DIR": str(log_dir), **(environ or {})}
    with log_path.open("w") as log, said_path.open("w") as said:
        process = subprocess.Popen(
            [*command, "--port", "0", *arguments],
            cwd=ROOT,
            env=variables,
            stdout=said,
            stderr=log,
        )
    try:
        yield HttpCluster(_url_of(process, said_path, log_path), process, log_path)
        process.send_signal(signal.SIGINT)
        code = process.wait(STOP_S)
        assert code == 0, f"kvrelay up ended with {code}:\n{log_path.read_text()[-4000:]}"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _url_of(process: subprocess.Popen[bytes], said_path: Path, log_path: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        if match := re.search(r"ready: (http://\S+)", said_path.read_text()):
            return match[1]
        time.sleep(0.05)
    raise AssertionError(f"not ready: {said_path.read_text()}\n{log_path.read_text()[-4000:]}")
