"""What holds for every test: no hub, one torch thread, and nothing left behind."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

SHARED_MEMORY = Path("/dev/shm")
SETTLE_S = 3.0
"""Threads and processes that were told to end may take that long."""
KEPT_THREADS = ("pydevd", "asyncio_", "AnyIO", "tqdm", "ThreadPoolExecutor")
"""Pools that libraries keep for the life of a process."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "allow_leaks(reason): what is left behind is on purpose")


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """Tests share few cores. torch is loaded by those tests alone that need it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a thread, a child process or a shared-memory segment."""
    if request.node.get_closest_marker("allow_leaks") is not None:
        yield
        return
    threads, children, segments = _threads(), _children(), _segments()
    yield
    deadline = time.monotonic() + SETTLE_S
    while True:
        left = [
            *(f"thread {thread.name}" for thread in _threads() - threads),
            *(f"process {pid}: {_command(pid)}" for pid in _children() - children),
            *(f"shared memory {name}" for name in _segments() - segments),
        ]
        if not left:
            return
        if time.monotonic() > deadline:
            pytest.fail("left behind: " + "; ".join(left))
        time.sleep(0.02)


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.name.startswith(KEPT_THREADS)}


def _children() -> set[int]:
    return {int(pid) for task in Path("/proc/self/task").glob("*/children") for pid in _read(task).split()}


def _segments() -> set[str]:
    """Of this process and its children; other test runs on this machine have their own."""
    return {path.name for path in SHARED_MEMORY.glob("kvrelay-*") if _is_ours(path.name)}


def _is_ours(segment: str) -> bool:
    pid = segment.split("-")[1]
    if not pid.isdecimal() or not psutil.pid_exists(int(pid)):
        return False  # of a process that was killed: the next owner of a segment removes it
    return int(pid) == os.getpid() or int(pid) in _children()


def _command(pid: int) -> str:
    return _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has just ended
        return ""
