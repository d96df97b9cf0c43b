"""A topology: a server, or a cluster of processes, on certain CPUs. Described by a TOML file in this folder.

CPUs are positions in the list of those that the experiment may use, so that one file serves every machine: ``"0;1"`` is one
worker on the first and one on the second. Topologies that are compared use the same ones.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from benchmarks.errors import SpecError, TopologySkipped
from service_kit.cpus import format_cpus, parse_cpus

FOLDER = Path(__file__).parent
NAME = r"^[a-z0-9][a-z0-9._-]*$"
SettingValue = str | int | float | bool


class Kvrelay(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="kvrelay"):
    """A cluster that `kvrelay up` starts."""

    name: Annotated[str, Meta(pattern=NAME)]
    title: str
    prefill: Annotated[int, Meta(ge=0, le=64)]
    decode: Annotated[int, Meta(ge=1, le=64)]
    policy: Literal["always", "never", "auto"]
    prefill_cpus: str = ""
    decode_cpus: str = ""
    coordinator_cpus: str = ""
    cores: Annotated[int, Meta(ge=1)] | None = None  # that its workers use; default: one per worker
    settings: Annotated[dict[str, SettingValue], Meta(description="more settings of `kvrelay up`")] = {}

    @property
    def num_cores(self) -> int:
        return self.cores or self.prefill + self.decode

    @property
    def is_split(self) -> bool:
        return self.prefill > 0 and self.policy != "never"


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="server"):
    """Any OpenAI-compatible server.

    In `command`, `prepare`, `environ` and `model_name`: {python} of its environment and {own_python}, {model} directory and
    {model_name} (its last part), {peers} (the folder of the peers' environments), {port}, {threads}, {cpus}.
    """

    name: Annotated[str, Meta(pattern=NAME)]
    title: str
    command: Annotated[list[str], Meta(min_length=1)]
    peer: Annotated[str, Meta(description="its environment's folder under CACHE/peers; empty: this one's Python")] = ""
    check: Annotated[str, Meta(description="a module that must be importable there")] = ""
    prepare: Annotated[list[str], Meta(description="run before the first start, such as a conversion")] = []
    environ: dict[str, str] = {}
    cpus: str = ""
    cores: Annotated[int, Meta(ge=1)] = 1
    ready: str = "/v1/models"
    start_s: float = 180.0
    endpoint: Literal["completions", "chat"] = "completions"
    model_name: Annotated[str, Meta(description="what requests call the model; default: the first of /v1/models")] = ""
    body: dict[str, Any] = {}
    stream_usage: bool = True

    @property
    def num_cores(self) -> int:
        return self.cores

    @property
    def is_split(self) -> bool:
        return False


class Running(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="url"):
    """A server that runs already, wherever it is; nothing is started or pinned."""

    name: Annotated[str, Meta(pattern=NAME)]
    title: str
    url: str
    cores: Annotated[int, Meta(ge=1)] = 1
    endpoint: Literal["completions", "chat"] = "completions"
    model_name: str = ""
    body: dict[str, Any] = {}
    stream_usage: bool = True

    @property
    def num_cores(self) -> int:
        return self.cores

    @property
    def is_split(self) -> bool:
        return False


Topology = Kvrelay | Server | Running


class Derived(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A topology of the folder with other settings: an experiment's axis."""

    name: Annotated[str, Meta(pattern=NAME)]
    base: str
    title: str = ""
    settings: dict[str, SettingValue] = {}


_XPYD = re.compile(r"(\d+)p(\d+)d(-unpinned)?")


def load_topology(name: str) -> Topology:
    """By the name of its file; ``3p2d-unpinned`` is made up on the spot, for workers that do not compute.

    Raises:
        SpecError
    """
    path = FOLDER / f"{name}.toml"
    if path.is_file():
        return read_topology(path)
    match = _XPYD.fullmatch(name)
    if match and match[3]:
        prefill, decode = int(match[1]), int(match[2])
        return Kvrelay(
            name=f"{prefill}p{decode}d",
            title=f"{prefill} prefill and {decode} decode workers, not pinned",
            prefill=prefill,
            decode=decode,
            policy="always" if prefill else "never",
        )
    known = ", ".join(sorted(one.stem for one in FOLDER.glob("*.toml")))
    raise SpecError(f"topologies: there is no {name!r}; there are {known}, and such as 3p2d-unpinned")


def read_topology(path: Path) -> Topology:
    """
    Raises:
        SpecError: names the file and the field.
    """
    try:
        topology: Topology = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Topology)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise SpecError(f"{path}: {error}") from error
    return topology


def with_settings(topology: Topology, settings: dict[str, SettingValue], name: str = "", title: str = "") -> Topology:
    """`settings` on top of its own, where it is ours; other servers know nothing of them."""
    changes: dict[str, Any] = {"name": name or topology.name, "title": title or topology.title}
    if isinstance(topology, Kvrelay):
        changes["settings"] = topology.settings | settings
    return msgspec.structs.replace(topology, **changes)


def real_cpus(positions: str, available: Sequence[int]) -> str:
    """``"0;1"`` as positions in `available` → the CPUs' own numbers, in the same form.

    Raises:
        TopologySkipped: fewer CPUs are available.
    """
    lists = []
    for part in positions.split(";") if positions.strip() else []:
        wanted = parse_cpus(part)
        if wanted and max(wanted) >= len(available):
            raise TopologySkipped(f"it needs {max(wanted) + 1} CPUs and there are {len(available)}")
        lists.append(format_cpus([available[one] for one in wanted]))
    return ";".join(lists)
