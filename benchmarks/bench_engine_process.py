"""One engine in a process of its own: started pinned, asked line by line, every answer with a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Job, Options

_ROOT = Path(__file__).resolve().parent.parent
_STOP_S = 5.0
_LOG_TAIL = 1500


class EngineFailed(Exception):
    """The process said an error, ended, or did not answer in time."""


class EngineProcess:
    """Use `running`, which also ends it."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    @classmethod
    @contextlib.contextmanager
    def running(
        cls, name: str, python: Path, module: str, options: Options, log: Path, preload: Sequence[Path] = ()
    ) -> Iterator[EngineProcess]:
        """A process of `python -m module`, from this checkout, whose stderr goes to `log`."""
        threads = str(options.threads)
        variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONPATH": str(_ROOT)}
        if preload:
            variables["LD_PRELOAD"] = ":".join(str(library) for library in preload)
        with log.open("w") as errors:
            process = subprocess.Popen(
                [str(python), "-m", module, options.to_json()],
                cwd=_ROOT,
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
            )
        engine = cls(name, process, log)
        try:
            yield engine
        finally:
            engine.stop()

    def hello(self, timeout_s: float) -> dict[str, Any]:
        """What it says of itself once it is ready."""
        return self._answer(timeout_s)

    def prepare(self, job: Job, timeout_s: float) -> None:
        self._ask({"do": "prepare", **asdict(job)}, timeout_s)

    def measure(self, repeats: int, timeout_s: float) -> list[float]:
        return [float(each) for each in self._ask({"do": "measure", "repeats": repeats}, timeout_s)["times"]]

    def release(self, timeout_s: float) -> None:
        self._ask({"do": "release"}, timeout_s)

    def first(self, prompt: list[int], timeout_s: float) -> int:
        return int(self._ask({"do": "first", "prompt": prompt}, timeout_s)["token"])

    def machine(self, timeout_s: float) -> tuple[float, float]:
        """Bytes and operations per second."""
        answer = self._ask({"do": "machine"}, timeout_s)
        return float(answer["bytes_per_s"]), float(answer["operations_per_s"])

    def _ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
        except (OSError, ValueError) as error:  # a broken pipe, or one that `stop` has closed
            raise EngineFailed(f"{self.name} is gone: {self._last_words()}") from error
        return self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise EngineFailed(f"{self.name} did not answer within {timeout_s:g} s") from None
        if not line:
            raise EngineFailed(f"{self.name} ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineFailed(f"{self.name}: {answer['error']}")
        return answer

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _last_words(self) -> str:
        return self._log.read_text(errors="replace")[-_LOG_TAIL:].strip() or "it said nothing"

    def stop(self) -> None:
        """End the process, and wait for that. May be called twice."""
        process = self._process
        if process.poll() is None:
            with contextlib.suppress(OSError, ValueError):
                assert process.stdin is not None
                process.stdin.write(json.dumps({"do": "quit"}) + "\n")
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def own_python() -> Path:
    return Path(sys.executable)
