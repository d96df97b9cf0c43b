"""A process that ends when the one that started it dies, however that dies (Linux: `prctl(2)`, PR_SET_PDEATHSIG)."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGTERM at the parent's death; it stays asked for across an exec.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before we asked
        raise SystemExit(f"process {parent_pid}, which was to be our parent, is gone")
