"""One child process: started, its output read line by line, its end reported once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

CHUNK_BYTES = 65536
MAX_LINE_BYTES = 2**20
"""Longer lines are cut into pieces."""
OUTPUT_S = 2.0
"""How long output is still read once the process has ended: its own children may hold the pipe open."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    command: tuple[str, ...]
    environ: Mapping[str, str]


class ChildProcess:
    """In a session of its own, so that Ctrl-C at the terminal reaches the supervisor alone."""

    def __init__(
        self, process: asyncio.subprocess.Process, on_line: Callable[[str], None], on_exit: Callable[[int], None]
    ) -> None:
        self.pid = process.pid
        self._process = process
        self._on_line = on_line
        self._on_exit = on_exit
        self._watch = asyncio.create_task(self._until_exit(), name=f"child {process.pid}")

    @classmethod
    async def start(cls, spec: ProcessSpec, on_line: Callable[[str], None], on_exit: Callable[[int], None]) -> ChildProcess:
        """
        Raises:
            OSError: the program cannot be run.
        """
        process = await asyncio.create_subprocess_exec(
            *spec.command,
            env=spec.environ,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        return cls(process, on_line, on_exit)

    def terminate(self) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, also to what it started."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def wait(self) -> None:
        """Returns behind the call of `on_exit`."""
        await asyncio.shield(self._watch)

    async def _until_exit(self) -> None:
        reading = asyncio.create_task(self._read_lines())
        code = await self._process.wait()
        await asyncio.wait([reading], timeout=OUTPUT_S)
        reading.cancel()
        self._on_exit(code)

    async def _read_lines(self) -> None:
        stdout = self._process.stdout
        if stdout is None:
            return
        rest = b""
        while data := await stdout.read(CHUNK_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                lines.append(rest)
                rest = b""
            for line in lines:
                self._on_line(line.decode(errors="replace").rstrip("\r"))
        if rest:
            self._on_line(rest.decode(errors="replace"))
