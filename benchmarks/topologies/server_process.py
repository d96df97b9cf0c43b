"""The process of a topology: started with its output in a file, ended with all that it started."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

LAST_LINES = 6
KILLED_S = 5.0


class ServerProcess:
    """In a session of its own, so that Ctrl-C at the terminal is ours to pass on."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    @classmethod
    async def start(cls, command: Sequence[str], environ: Mapping[str, str], log: Path) -> ServerProcess:
        """
        Raises:
            OSError: the program cannot be run, or the log cannot be written.
        """
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *command, env=environ, stdin=asyncio.subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        return cls(process, log)

    def death(self) -> str:
        """Why it is gone; empty while it runs."""
        code = self._process.returncode
        return "" if code is None else f"it ended with code {code}: {self.last_lines()} (all of it: {self._log})"

    def last_lines(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return " | ".join(line.strip()[:200] for line in lines[-LAST_LINES:] if line.strip()) or "no output"

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of every process of it, by what its command line runs."""
        seconds: dict[str, float] = {}
        with suppress(psutil.Error):
            top = psutil.Process(self._process.pid)
            for process in [top, *top.children(recursive=True)]:
                with suppress(psutil.Error):
                    times = process.cpu_times()
                    seconds[_name_of(process)] = seconds.get(_name_of(process), 0.0) + times.user + times.system
        return seconds

    async def stop(self, timeout_s: float) -> None:
        """SIGINT, then SIGKILL to its whole session."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGINT)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), timeout_s)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), KILLED_S)


def _name_of(process: psutil.Process) -> str:
    """``decode_service:0`` by its settings' worker id where there is one, else by its module."""
    arguments = process.cmdline()
    with suppress(psutil.Error, KeyError):
        environ = process.environ()
        for section in ("PREFILL", "DECODE"):
            if worker_id := environ.get(f"KVRELAY_{section}_WORKER_ID"):
                return str(worker_id)
    if "-m" in arguments[:-1]:
        return str(arguments[arguments.index("-m") + 1])
    return Path(arguments[0]).name if arguments else str(process.name())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
