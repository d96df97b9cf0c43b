"""Real signals to a real process: each test starts one whose main writes down its stages."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from service_kit.launch import launch_command
from service_kit.notify import parse_notification

ROOT = Path(__file__).parents[3]

PROGRAM = """
import asyncio, sys
from service_kit.lifecycle import Lifecycle

async def main(lifecycle):
    say("start")
    try:
        {start}
        lifecycle.ready()
        say("ready")
        await lifecycle.stop_requested()
        say("drain")
        {drain}
        return 0
    finally:
        say("stop")

def say(text):
    print(text, flush=True)

code = Lifecycle(drain_s={drain_s}).run(main)
say(f"code {{code}}")
sys.exit(code)
"""


@contextmanager
def program(
    *, start: str = "pass", drain: str = "pass", drain_s: float = 5.0, environ: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    code = textwrap.dedent(PROGRAM).format(start=start, drain=drain, drain_s=drain_s)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **(environ or {})}
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def lines_until(process: subprocess.Popen[str], last: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if lines[-1] == last:
            return lines
    raise AssertionError(f"the process ended after {lines}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(number: signal.Signals) -> None:
    with program(drain="await asyncio.sleep(0.1)") as process:
        lines_until(process, "ready")
        process.send_signal(number)
        assert lines_until(process, "code 0") == ["drain", "stop", "code 0"]
        assert process.wait(5) == 0


def test_a_second_signal_ends_at_once() -> None:
    with program(drain="await asyncio.sleep(60)", drain_s=60) as process:
        lines_until(process, "ready")
        process.send_signal(signal.SIGTERM)
        lines_until(process, "drain")
        process.send_signal(signal.SIGINT)
        assert lines_until(process, "code 130") == ["stop", "code 130"]
        assert process.wait(5) == 130


def test_a_drain_is_cut_short_at_its_deadline() -> None:
    with program(drain="await asyncio.sleep(60)", drain_s=0.1) as process:
        lines_until(process, "ready")
        process.send_signal(signal.SIGTERM)
        assert lines_until(process, "code 1") == ["drain", "stop", "code 1"]


def test_a_start_that_is_stopped_has_nothing_to_drain() -> None:
    with program(start="say('starting'); await asyncio.sleep(60)") as process:
        lines_until(process, "starting")
        process.send_signal(signal.SIGTERM)
        assert lines_until(process, "code 0") == ["stop", "code 0"]


def test_the_starter_hears_of_the_stages(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.settimeout(10)
        receiver.bind(str(tmp_path / "notify"))
        with program(environ={"NOTIFY_SOCKET": str(tmp_path / "notify")}) as process:
            first = parse_notification(receiver.recv(4096))
            assert first == {"READY": "1", "MAINPID": str(process.pid)}
            process.send_signal(signal.SIGTERM)
            assert parse_notification(receiver.recv(4096))["STOPPING"] == "1"
            assert process.wait(5) == 0


def test_a_child_ends_with_the_parent_that_is_killed(tmp_path: Path) -> None:
    # 1. A parent starts a child through the launcher; the child says who it is.
    child = textwrap.dedent(PROGRAM).format(start="say(__import__('os').getpid())", drain="pass", drain_s=5)
    (tmp_path / "child_program.py").write_text(child)
    parent = """
import os, subprocess, time
from service_kit.launch import launch_command
subprocess.Popen(launch_command("child_program", parent_pid=os.getpid(), cpus="0", threads=3))
time.sleep(60)
"""
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, env=environ)
    pid = int(lines_until(process, "ready")[1])
    # 2. The launcher has become the child, pinned and with its thread count.
    assert os.sched_getaffinity(pid) == {0}
    assert b"OMP_NUM_THREADS=3" in Path(f"/proc/{pid}/environ").read_bytes()
    assert b"child_program" in Path(f"/proc/{pid}/cmdline").read_bytes()
    # 3. kill -9 of the parent drains the child.
    process.kill()
    assert lines_until(process, "code 0") == ["drain", "stop", "code 0"]
    process.communicate()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("cpus", ["x", "4000"])
def test_cpus_that_do_not_exist_stop_the_start(cpus: str) -> None:
    result = subprocess.run(launch_command("this", cpus=cpus), capture_output=True, text=True, cwd=ROOT, timeout=20)
    assert result.returncode == 2
    assert cpus in result.stderr
