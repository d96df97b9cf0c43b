"""Marks a process so that another one on the same host can see whether it still exists."""

from __future__ import annotations

import os
from pathlib import Path

from wire.handoff import ProcessMark

_PROC = Path("/proc")


def own_mark() -> ProcessMark:
    pid = os.getpid()
    return ProcessMark(pid, _start_ticks(pid) or 0, _pid_namespace(), _boot_id())


def is_gone(mark: ProcessMark) -> bool:
    """True only when it is certain: same boot, same pid namespace, and no such process (or another one with its pid).

    False also means "cannot be seen from here".
    """
    if not mark.pid_namespace or mark.pid_namespace != _pid_namespace() or mark.boot_id != _boot_id():
        return False
    return _start_ticks(mark.pid) != mark.start_ticks


def _start_ticks(pid: int) -> int | None:
    """Start time in clock ticks since boot; None when there is no such process, or only its zombie."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()  # the command's name may hold blanks and brackets
    return None if state in ("Z", "X") else int(fields[18])


def _pid_namespace() -> str:
    try:
        return str((_PROC / "self" / "ns" / "pid").readlink())
    except OSError:
        return ""


def _boot_id() -> str:
    try:
        return (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
    except OSError:
        return ""
