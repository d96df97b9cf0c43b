"""Who may ask: API keys from the settings and from a file that is read again when it changes."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

_log = logging.getLogger(__name__)
_CHECK_EVERY_S = 1.0


class KeyRing:
    """Knows keys by their digests alone.

    The file has one key a line; empty lines and those that begin with `#` are skipped. A file that has become unreadable,
    empty or wrong changes nothing, and is logged: nobody is let in, or shut out, by a half-written file.

    Args:
        clock: monotonic seconds.

    Raises:
        OSError: the file cannot be read now.
        ValueError: a key is empty or not printable ASCII, or the file has none.
    """

    def __init__(self, keys: Sequence[str], path: Path | None, clock: Callable[[], float]) -> None:
        self._fixed = tuple(_digest(_checked(key)) for key in keys)
        self._path = path
        self._clock = clock
        self._stamp = None if path is None else _stamp(path)
        self._from_file = () if path is None else _read(path)
        self._checked_at = clock()

    @property
    def is_needed(self) -> bool:
        return self._path is not None or bool(self._fixed)

    def identify(self, key: bytes) -> str | None:
        """A stable name of the client whose key this is, which tells nothing of the key; None: nobody's.

        All keys are compared, each in constant time: how long it takes tells nothing.
        """
        self._refresh()
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, known) for known in (*self._fixed, *self._from_file)]
        return digest.hex()[:16] if any(matches) else None

    def _refresh(self) -> None:
        if self._path is None or self._clock() < self._checked_at + _CHECK_EVERY_S:
            return
        self._checked_at = self._clock()
        try:
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            self._from_file, self._stamp = _read(self._path), stamp
            _log.info("%s: %d API keys", self._path, len(self._from_file))
        except (OSError, ValueError) as error:
            _log.error("API keys stay as they are: %s", error)


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: Path) -> tuple[bytes, ...]:
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    try:
        keys = tuple(_digest(_checked(line)) for line in lines if line and not line.startswith("#"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not keys:
        raise ValueError(f"{path}: it holds no key")
    return keys


def _checked(key: str) -> bytes:
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("api_keys: a key must be printable ASCII without blanks")
    return key.encode("ascii")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
