"""Environments for other people's software.

Made outside the tree, kept in the user's cache, and made anew when what is asked of them changes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

INSTALL_S = 1800.0


def cache_directory() -> Path:
    """$KVRELAY_CLIENTS_CACHE, or `kvrelay-clients` in the user's cache."""
    if given := os.environ.get("KVRELAY_CLIENTS_CACHE"):
        return Path(given).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrelay-clients"


def python_environment(name: str, packages: Sequence[str], constraints: Path | None = None) -> Path:
    """The interpreter of an environment with `packages`, which pip may resolve as it likes within `constraints`."""
    wanted = _digest([sys.version, *packages, *_pins(packages, constraints)])
    directory = cache_directory() / name
    python, stamp = directory / "bin" / "python", directory / ".made-of"
    if not (stamp.is_file() and stamp.read_text() == wanted):
        print(f"making {directory} with {' '.join(packages)}", flush=True)
        shutil.rmtree(directory, ignore_errors=True)
        venv.create(directory, with_pip=True)
        limits = ["-c", str(constraints)] if constraints else []
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *limits, *packages]
        subprocess.run(command, check=True, timeout=INSTALL_S)
        stamp.write_text(wanted)
    return python


def npm_environment(name: str, packages: Sequence[str]) -> Path:
    """A directory whose `node_modules` hold `packages`."""
    directory, wanted = cache_directory() / name, _digest(packages)
    stamp = directory / ".made-of"
    if not (stamp.is_file() and stamp.read_text() == wanted):
        print(f"making {directory} with {' '.join(packages)}", flush=True)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        subprocess.run(["npm", "install", "--silent", *packages], cwd=directory, check=True, timeout=INSTALL_S)
        stamp.write_text(wanted)
    return directory


def _pins(packages: Sequence[str], constraints: Path | None) -> list[str]:
    """What `constraints` say of the packages themselves: other lines may change without a new environment."""
    lines = constraints.read_text().splitlines() if constraints else []
    return [line for line in lines if line.partition("==")[0] in packages]


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
