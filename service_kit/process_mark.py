"""Marks a process so that another one on the same host can see whether it still exists.

Two ways, since either may be blind: the process table (same pid namespace alone), and a shared-memory segment that its owner
holds a lock on for life (wherever shared memory is shared, such as two containers with one /dev/shm).
"""

from __future__ import annotations

import os
from pathlib import Path

from transport.errors import TransportError
from transport.shm_segment import Segment, SegmentName, owner_is_alive
from wire.handoff import ProcessMark

_PROC = Path("/proc")
_LIFE_BYTES = 4096


class OwnMark:
    """This process' mark; the life segment is held until `close`, or until the process is dead."""

    def __init__(self) -> None:
        self._segment: Segment | None = None
        life = SegmentName("", 0, 0)
        try:
            self._segment = Segment.create(_LIFE_BYTES)
            life = self._segment.name
        except (TransportError, OSError):
            self._segment = None  # no shared memory here: nobody could write into a shared segment either
        pid = os.getpid()
        self.mark = ProcessMark(pid, _start_ticks(pid) or 0, _pid_namespace(), _boot_id(), life.name, life.inode)

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None


class ProcessWatch:
    """Another process, watched from the moment when it was known to be alive."""

    def __init__(self, mark: ProcessMark) -> None:
        self._mark = mark
        self._sees_pid = bool(mark.pid_namespace) and mark.pid_namespace == _pid_namespace() and mark.boot_id == _boot_id()
        self._life = SegmentName(mark.life_name, mark.life_inode, _LIFE_BYTES)
        self._sees_life = owner_is_alive(self._life) is True

    def is_gone(self) -> bool:
        """True only when it is certain; False also means that it cannot be seen from here."""
        if self._sees_pid and _start_ticks(self._mark.pid) != self._mark.start_ticks:
            return True
        return self._sees_life and not owner_is_alive(self._life)


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
