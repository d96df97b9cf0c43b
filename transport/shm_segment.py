"""Named POSIX shared memory whose owner is known to be alive.

The owner holds an exclusive flock on its segment for life. The kernel drops it when the owner dies, however it dies; so a
segment whose lock can be taken belongs to nobody and is unlinked by the next one who creates a segment. Process ids in names
are for people: they are never trusted (processes in different containers may share the folder).
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import stat
from dataclasses import dataclass

from transport.errors import TransportError
from transport.memory import close_when_unused

_FOLDER = "/dev/shm"  # noqa: S108  the kernel's folder of POSIX segments, not a temporary file
_NAME = re.compile(r"kvrelay-[0-9]{1,10}-[0-9a-f]{32}")
_ATTEMPTS = 10


@dataclass(frozen=True, slots=True)
class SegmentName:
    """Which segment: the inode tells a successor under the same name apart."""

    name: str
    inode: int
    nbytes: int


class Segment:
    """Created and owned by this process; `close` unlinks it."""

    def __init__(self, fd: int, name: str, nbytes: int) -> None:
        self._fd = fd
        self.map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
        self.name = SegmentName(name, os.fstat(fd).st_ino, nbytes)

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """Sparse: pages come when they are first touched.

        Raises:
            TransportError: the folder has no room, or is not there.
        """
        try:
            _check_room(nbytes)
            for _ in range(_ATTEMPTS):
                segment = cls._try_create(nbytes)
                if segment is not None:
                    return segment
        except OSError as error:
            raise TransportError(f"cannot create a shared-memory segment of {nbytes} bytes: {error}") from error
        raise TransportError(f"cannot create a shared-memory segment of {nbytes} bytes: others keep taking its lock")

    def close(self) -> None:
        _unlink_if_same(self.name.name, self.name.inode)
        close_when_unused(self.map)
        os.close(self._fd)

    @classmethod
    def _try_create(cls, nbytes: int) -> Segment | None:
        name = f"kvrelay-{os.getpid()}-{secrets.token_hex(16)}"
        path = f"{_FOLDER}/{name}"
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # A janitor may see the file before it is locked, and then unlinks it: try another name.
            if not _try_lock(fd) or not _is_same(path, os.fstat(fd).st_ino):
                _unlink_if_same(name, os.fstat(fd).st_ino)
                os.close(fd)
                return None
            os.ftruncate(fd, nbytes)
            return cls(fd, name, nbytes)
        except OSError:
            _unlink_if_same(name, os.fstat(fd).st_ino)
            os.close(fd)
            raise


def map_segment(wanted: SegmentName) -> mmap.mmap:
    """A peer's segment, readable and writable.

    Raises:
        TransportError: it is gone, not ours to open, or not the one that was described.
    """
    if _NAME.fullmatch(wanted.name) is None:
        raise TransportError("the descriptor does not name a kvrelay segment")
    try:
        fd = os.open(f"{_FOLDER}/{wanted.name}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise TransportError(f"segment {wanted.name} cannot be opened: {error}") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_ino != wanted.inode or found.st_size != wanted.nbytes:
            raise TransportError(f"segment {wanted.name} is not the one that was described")
        return mmap.mmap(fd, wanted.nbytes, flags=mmap.MAP_SHARED)
    except (OSError, ValueError) as error:
        raise TransportError(f"segment {wanted.name} cannot be mapped: {error}") from error
    finally:
        os.close(fd)


def owner_is_alive(wanted: SegmentName) -> bool | None:
    """Whether the process that made this segment still runs; None when the segment cannot be seen from here.

    A segment that is gone was closed by its owner, or unlinked by a janitor who found the owner dead: callers who must tell
    "gone" from "never visible" look once while the owner is known to be alive.
    """
    if _NAME.fullmatch(wanted.name) is None:
        return None
    try:
        fd = os.open(f"{_FOLDER}/{wanted.name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if os.fstat(fd).st_ino != wanted.inode:
            return None
        return not _try_lock(fd)  # a lock that was taken here goes with the descriptor
    finally:
        os.close(fd)


def unlink_orphans() -> list[str]:
    """Unlinks the segments of dead owners; returns their names."""
    removed = []
    with os.scandir(_FOLDER) as entries:
        names = [entry.name for entry in entries if _NAME.fullmatch(entry.name)]
    for name in names:
        try:
            fd = os.open(f"{_FOLDER}/{name}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or gone meanwhile
        try:
            if _try_lock(fd) and _unlink_if_same(name, os.fstat(fd).st_ino):
                removed.append(name)
        finally:
            os.close(fd)
    return removed


def _check_room(nbytes: int) -> None:
    room = os.statvfs(_FOLDER)
    free = room.f_bavail * room.f_frsize
    if nbytes > free:
        raise TransportError(
            f"{_FOLDER} has {free} bytes free, a region needs {nbytes}: enlarge it (docker: --shm-size) or shrink the region"
        )


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same(path: str, inode: int) -> bool:
    try:
        return os.stat(path, follow_symlinks=False).st_ino == inode
    except FileNotFoundError:
        return False


def _unlink_if_same(name: str, inode: int) -> bool:
    path = f"{_FOLDER}/{name}"
    if not _is_same(path, inode):
        return False
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return True
