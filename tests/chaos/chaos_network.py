"""What lies between the coordinator (this process), P and D: three cables that can be pulled one by one.

    coordinator ── p-c ── P        P and D each in a network namespace of its own, joined by veth pairs, so that a pulled
         └─ d-c ── D ── p-d ──┘    cable is what a real one is: silence, no reset, and connections that may come back

Where namespaces cannot be made (no root, no `ip`), everything runs over loopback and no cable can be pulled.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from dataclasses import dataclass

CABLES = ("p-c", "d-c", "p-d")
_COUNTER = itertools.count(1)


@dataclass(frozen=True)
class Loopback:
    """No cables."""

    reason: str  # why there are none
    coordinator_listens: str = "127.0.0.1"
    coordinator_seen_by_prefill: str = "127.0.0.1"
    coordinator_seen_by_decode: str = "127.0.0.1"
    decode: str = "127.0.0.1"

    def command(self, role: str) -> list[str]:
        return []

    def pull(self, cable: str) -> None:
        raise RuntimeError(self.reason)

    def plug(self, cable: str) -> None:
        raise RuntimeError(self.reason)

    def close(self) -> None:
        pass


class Namespaces:
    """Two namespaces and three veth pairs, named after this process; `close` removes them."""

    reason = ""
    coordinator_listens = "0.0.0.0"  # the two cables lead here

    def __init__(self) -> None:
        tag = f"{os.getpid() % 100000}{next(_COUNTER) % 100:02d}"
        self._spaces = {"prefill": f"kvr-p-{tag}", "decode": f"kvr-d-{tag}"}
        net = f"10.213.{int(tag) % 64 * 4}"  # three networks of four addresses
        self.coordinator_seen_by_prefill = f"{net}.1"
        self.coordinator_seen_by_decode = f"{net}.5"
        self.decode = f"{net}.10"
        prefill, decode = self._spaces["prefill"], self._spaces["decode"]
        # cable: (its end that is pulled: namespace, device), then both ends: namespace ("" is this one), device, address
        self._ends = {
            "p-c": (("", f"vc{tag}", f"{net}.1"), (prefill, f"vp{tag}", f"{net}.2")),
            "d-c": (("", f"wc{tag}", f"{net}.5"), (decode, f"wd{tag}", f"{net}.6")),
            "p-d": ((prefill, f"xp{tag}", f"{net}.9"), (decode, f"xd{tag}", f"{net}.10")),
        }
        try:
            for space in self._spaces.values():
                _run("ip", "netns", "add", space)
                _run("ip", "-n", space, "link", "set", "lo", "up")
            for one, other in self._ends.values():
                _run("ip", "link", "add", one[1], "type", "veth", "peer", "name", other[1])
                for space, device, address in (one, other):
                    if space:
                        _run("ip", "link", "set", device, "netns", space)
                    _run("ip", *_in(space), "addr", "add", f"{address}/30", "dev", device)
                    _run("ip", *_in(space), "link", "set", device, "up")
        except BaseException:
            self.close()
            raise

    def command(self, role: str) -> list[str]:
        """What a process of this role is started by; it becomes the process."""
        return ["ip", "netns", "exec", self._spaces[role]]

    def pull(self, cable: str) -> None:
        (space, device, _), _ = self._ends[cable]
        _run("ip", *_in(space), "link", "set", device, "down")

    def plug(self, cable: str) -> None:
        (space, device, _), _ = self._ends[cable]
        _run("ip", *_in(space), "link", "set", device, "up")

    def close(self) -> None:
        for (space, device, _), _ in self._ends.values():
            subprocess.run(["ip", *_in(space), "link", "del", device], capture_output=True, timeout=10)
        for space in self._spaces.values():
            subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=10)


Network = Loopback | Namespaces


def make_network() -> Network:
    for tool in ("ip",):
        if shutil.which(tool) is None:
            return Loopback(f"network namespaces need the tool {tool}")
    try:
        return Namespaces()
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", b"") or b""
        return Loopback(f"network namespaces cannot be made here: {error} {detail.decode(errors='replace').strip()}")


def _in(space: str) -> list[str]:
    return ["-n", space] if space else []


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=10)
