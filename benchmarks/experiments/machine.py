"""What must stand beside a figure: the machine, the versions, the commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.experiments.results import Machine
from service_kit.cpus import format_cpus

PACKAGES = ("kvrelay", "torch", "transformers", "numpy", "aiohttp", "pyzmq", "uvloop")
ROOT = Path(__file__).resolve().parents[2]


def this_machine(cpus: Sequence[int]) -> Machine:
    return Machine(
        cpu=_cpu_model(),
        cpus=format_cpus(cpus),
        num_cpus=os.cpu_count() or 0,
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        kernel=f"{platform.system()} {platform.release()}",
        load_average=round(os.getloadavg()[0], 2),
    )


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Of the checkout that runs, with a mark if files differ from it; empty outside of one."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + (" with local changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def command_line() -> str:
    return " ".join(["kvrelay", "bench", *sys.argv[1:]] if sys.argv[1:2] != ["bench"] else ["kvrelay", *sys.argv[1:]])


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "")
    extras = [name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16") if f" {name}" in flags]
    return f"{names[0] if names else platform.machine()} ({', '.join(extras) or 'no vector extensions known'})"
