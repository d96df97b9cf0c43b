"""Which CPUs each worker of a local cluster gets.

--prefill-cpus 0-3      all prefill workers share these evenly: with two, one gets 0-1, the other 2-3
--prefill-cpus "0;2-3"  the first worker gets 0, the second 2-3, a third 0 again
nothing                 no pinning; the threads of all workers together are as many as the CPUs
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from service_kit.cpus import parse_cpus


@dataclass(frozen=True, slots=True)
class CpuShare:
    """`cpus` empty = not pinned."""

    cpus: tuple[int, ...]
    threads: int


def parse_cpu_lists(text: str) -> tuple[tuple[int, ...], ...]:
    """One list for all workers of a role, or one per worker; () = none given.

    Raises:
        ValueError: not lists of CPUs, or an empty one among several.
    """
    if not text.strip():
        return ()
    lists = tuple(parse_cpus(part) for part in text.split(";"))
    if not all(lists):
        raise ValueError(f"{text!r} holds an empty list of CPUs")
    return lists


def cpu_share(lists: tuple[tuple[int, ...], ...], index: int, num_of_role: int, num_cpus: int, num_workers: int) -> CpuShare:
    """The share of worker `index` of its role.

    Args:
        num_of_role: workers of this role among which a single list is split; later ones double up.
        num_cpus, num_workers: CPUs of this host and workers of every role, for workers that are not pinned.
    """
    if not lists:
        return CpuShare((), max(1, num_cpus // max(1, num_workers)))
    if len(lists) > 1:
        cpus = lists[index % len(lists)]
        return CpuShare(cpus, len(cpus))
    parts = split_evenly(lists[0], num_of_role)
    cpus = parts[index % len(parts)]
    return CpuShare(cpus, len(cpus))


def split_evenly(cpus: tuple[int, ...], num_parts: int) -> list[tuple[int, ...]]:
    """Contiguous parts whose sizes differ by at most one; fewer CPUs than parts are shared in turn."""
    if len(cpus) < num_parts:
        return [(cpus[part % len(cpus)],) for part in range(num_parts)]
    bounds = [part * len(cpus) // num_parts for part in range(num_parts + 1)]
    return [cpus[begin:end] for begin, end in pairwise(bounds)]
