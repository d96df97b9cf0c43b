"""Where a running local cluster keeps its sockets, and how other commands find it.

    $XDG_RUNTIME_DIR/kvrelay/  or  /tmp/kvrelay-UID/       0700, ours alone
        8000.lock       locked for as long as the cluster on port 8000 runs: the kernel drops the lock, whatever kills it
        8000/           its sockets, and cluster.json

Whoever gets the lock may remove what lies under it, so a cluster that was killed leaves nothing that lasts.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from cluster.errors import ClusterError, ClusterNotFound

RECORD = "cluster.json"
CONTROL_SOCKET = "control.sock"
MAX_SOCKET_PATH = 100
"""Of 107 bytes that a socket's address may have; the rest is left to file names."""


class ClusterRecord(msgspec.Struct, frozen=True):
    """What `kvrelay scale` and `kvrelay status` need of a running cluster."""

    port: int
    pid: int
    url: str
    control: str  # path of the control socket


def base_directory(environ: Mapping[str, str]) -> Path:
    """
    Raises:
        ClusterError: the directory belongs to someone else, or others may look into it.
    """
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        base = Path(runtime) / "kvrelay"
    else:
        base = Path(environ.get("TMPDIR") or tempfile.gettempdir()) / f"kvrelay-{os.getuid()}"
    if len(os.fsencode(base)) + len("/65535/") + len(CONTROL_SOCKET) > MAX_SOCKET_PATH:
        raise ClusterError(f"{base} is too long a path for sockets; set XDG_RUNTIME_DIR to a shorter one")
    base.mkdir(mode=0o700, exist_ok=True)
    status = base.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ClusterError(f"{base} must be a directory of user {os.getuid()} that nobody else may enter")
    return base


@contextmanager
def run_directory(port: int, environ: Mapping[str, str]) -> Iterator[Path]:
    """A private, empty directory for the cluster on `port`; gone, with all in it, behind the block.

    Raises:
        ClusterError: a cluster runs on that port already.
    """
    base = base_directory(environ)
    lock_path = base / f"{port}.lock"
    lock = _take(lock_path)
    if lock is None:
        raise ClusterError(f"a cluster runs on port {port} already")
    directory = base / str(port)
    try:
        shutil.rmtree(directory, ignore_errors=True)  # left by one that was killed
        directory.mkdir(mode=0o700)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        _drop(lock_path, lock)


def write_record(directory: Path, record: ClusterRecord) -> None:
    temporary = directory / f"{RECORD}.new"
    temporary.write_bytes(msgspec.json.encode(record))
    temporary.rename(directory / RECORD)


def running_clusters(environ: Mapping[str, str]) -> list[ClusterRecord]:
    """Clusters of this user that run, by port. What killed ones left is removed."""
    base = base_directory(environ)
    records = []
    for lock_path in sorted(base.glob("*.lock")):
        directory = lock_path.with_suffix("")
        lock = _take(lock_path)
        if lock is not None:
            shutil.rmtree(directory, ignore_errors=True)
            _drop(lock_path, lock)
            continue
        with suppress(FileNotFoundError, msgspec.DecodeError):  # it is just starting or stopping
            records.append(msgspec.json.decode((directory / RECORD).read_bytes(), type=ClusterRecord))
    with suppress(OSError):
        base.rmdir()
    return records


def find_cluster(port: int | None, environ: Mapping[str, str]) -> ClusterRecord:
    """The cluster on `port`, or the only one.

    Raises:
        ClusterNotFound
    """
    records = running_clusters(environ)
    matching = [record for record in records if port in (None, record.port)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise ClusterNotFound(
            f"several clusters run: give --port, one of {', '.join(str(record.port) for record in matching)}"
        )
    raise ClusterNotFound(
        "no local cluster runs" + ("" if port is None else f" on port {port}") + "; start one with: kvrelay up"
    )


def _take(path: Path) -> int | None:
    """The lock's file descriptor, or None when someone else holds it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        with suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                return descriptor
        os.close(descriptor)  # removed between the open and the lock


def _drop(path: Path, descriptor: int) -> None:
    path.unlink(missing_ok=True)
    os.close(descriptor)
    with suppress(OSError):  # others run
        path.parent.rmdir()
