"""Which CPUs a process may use, and how many threads its kernels start.

Both must be settled before torch is imported: OpenMP reads its variables once. So whoever starts a process pins itself,
sets the variables, and replaces itself by the process (see `service_kit.launch`); affinity survives an exec.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def parse_cpus(text: str) -> tuple[int, ...]:
    """``"0-3,5"`` → (0, 1, 2, 3, 5); ``""`` → ().

    Raises:
        ValueError: not a list of CPUs.
    """
    cpus: set[int] = set()
    for part in (part.strip() for part in text.split(",") if part.strip()):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
            raise ValueError(f"{text!r} is not a list of CPUs such as 0-3,5")
        cpus.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cpus))


def format_cpus(cpus: Collection[int]) -> str:
    """The inverse of `parse_cpus`, with ranges."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def available_cpus() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0)))


def pin(cpus: Sequence[int]) -> None:
    """Let this process, and all that it starts, run on `cpus` alone.

    Raises:
        ValueError: this process may not use one of them.
    """
    foreign = sorted(set(cpus) - set(available_cpus()))
    if foreign:
        raise ValueError(f"CPU {format_cpus(foreign)} is not available here; there are {format_cpus(available_cpus())}")
    os.sched_setaffinity(0, cpus)


def thread_environ(num_threads: int) -> dict[str, str]:
    """Variables that make numeric libraries start `num_threads` threads."""
    return dict.fromkeys(THREAD_VARIABLES, str(num_threads))
