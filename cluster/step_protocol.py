"""How a subprocess that prepares a model tells how far it is: JSON lines on its standard output.

The work happens in a process of its own because it imports torch and transformers, which `kvrelay` itself never does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from cluster.errors import ModelError
from service_kit.launch import launch_command

OnProgress = Callable[[str, float], None]
"""The stage's name, and the fraction of it that is done, 0 to 1."""

PREPARE_S = 2 * 3600.0
KEPT_LINES = 5


class Step(msgspec.Struct, frozen=True, tag="step"):
    stage: str
    fraction: float


class Result(msgspec.Struct, frozen=True, tag="result"):
    value: str


class Error(msgspec.Struct, frozen=True, tag="error"):
    reason: str


def run_steps(work: Callable[[OnProgress], str]) -> int:
    """The subprocess' main: run `work(on_progress)`, report its result or its error; returns the exit code."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no message

    def say(message: Step | Result | Error) -> None:
        out.write(msgspec.json.encode(message) + b"\n")

    try:
        say(Result(work(lambda stage, fraction: say(Step(stage, fraction)))))
    except Exception as error:
        say(Error(" ".join(str(error).split()) or type(error).__name__))
        return 1
    return 0


def call(module: str, arguments: list[str], environ: Mapping[str, str], on_progress: OnProgress) -> str:
    """Run `module`, a program made of `run_steps`, and return its result.

    Raises:
        ModelError: it reported an error, died, or took longer than two hours.
    """
    process = subprocess.Popen(
        launch_command(module, *arguments, parent_pid=os.getpid()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
    )
    noise: deque[str] = deque(maxlen=KEPT_LINES)
    reader = threading.Thread(target=_collect, args=(process, noise), name="prepare stderr")
    reader.start()
    watchdog = threading.Timer(PREPARE_S, process.kill)
    watchdog.start()
    started = time.monotonic()
    try:
        outcome = _read_outcome(process, on_progress)
        process.wait()
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        reader.join()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    if isinstance(outcome, Result):
        return outcome.value
    if isinstance(outcome, Error):
        raise ModelError(outcome.reason)
    if time.monotonic() - started >= PREPARE_S:
        raise ModelError(f"{module} took longer than {PREPARE_S:g} s")
    raise ModelError(f"{module} ended with code {process.returncode}: {' | '.join(noise) or 'no output'}")


def _read_outcome(process: subprocess.Popen[bytes], on_progress: OnProgress) -> Result | Error | None:
    for line in process.stdout or ():
        try:
            message: Step | Result | Error = msgspec.json.decode(line, type=Step | Result | Error)
        except msgspec.DecodeError:
            continue
        if not isinstance(message, Step):
            return message
        on_progress(message.stage, message.fraction)
    return None


def _collect(process: subprocess.Popen[bytes], noise: deque[str]) -> None:
    for line in process.stderr or ():
        if text := line.decode(errors="replace").strip():
            noise.append(text)
