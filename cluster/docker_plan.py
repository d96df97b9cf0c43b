"""What scaling a service's containers takes: from what is there to what is wanted, without touching an engine.

The containers of a service are numbered by Compose. More are wanted: stopped ones are started first, then new ones are made
as copies of one that is there, under the lowest free numbers. Fewer: the highest numbers are drained and removed, except
that the last container of all is only stopped, since the next ones are copied from it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import ClusterError

NUMBER_LABEL = "com.docker.compose.container-number"
SERVICE_LABEL = "com.docker.compose.service"
PROJECT_LABEL = "com.docker.compose.project"
ONEOFF_LABEL = "com.docker.compose.oneoff"
REPLACE_LABEL = "com.docker.compose.replace"
ID_CHARACTERS = 12  # of a container's id in its default host name and alias


@dataclass(frozen=True, slots=True)
class ServiceContainer:
    container_id: str
    number: int
    running: bool


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """Everything is to happen at once; container ids, except `create`, which holds numbers."""

    start: tuple[str, ...] = ()
    create: tuple[int, ...] = ()
    remove: tuple[str, ...] = ()  # drained first where they run
    stop: tuple[str, ...] = ()  # drained and kept


def plan_scale(service: str, containers: Sequence[ServiceContainer], wanted: int) -> ScalePlan:
    """
    Raises:
        ClusterError: more are wanted and there is none to copy.
    """
    if not containers:
        if wanted == 0:
            return ScalePlan()
        raise ClusterError(f"{service}: there is no container to copy; start the project with `docker compose up` first")
    # Running ones stay before stopped ones, low numbers before high ones.
    ordered = sorted(containers, key=lambda container: (not container.running, container.number))
    kept, surplus = ordered[: max(wanted, 1)], ordered[max(wanted, 1) :]
    removed = tuple(container.container_id for container in surplus)
    if wanted == 0:
        return ScalePlan(stop=tuple(one.container_id for one in kept if one.running), remove=removed)
    taken = {container.number for container in containers}
    free = (number for number in range(1, wanted + len(containers) + 1) if number not in taken)
    return ScalePlan(
        start=tuple(container.container_id for container in kept if not container.running),
        create=tuple(number for number, _ in zip(free, range(wanted - len(kept)), strict=False)),
        remove=removed,
    )


def copied_config(template: Mapping[str, Any], number: int, image: str) -> dict[str, Any]:
    """The body of the engine's `POST /containers/create` for one more container like an inspected one.

    What belongs to that container alone is left out: its host name and alias (the engine makes them of the new id), its
    addresses and its number.

    Args:
        image: what the copy is made from.
    """
    config: dict[str, Any] = copy.deepcopy(dict(template["Config"]))
    own_id = str(template["Id"])[:ID_CHARACTERS]
    own_name = str(template["Name"]).lstrip("/")
    if config.get("Hostname") == own_id:
        del config["Hostname"]
    config["Image"] = image
    config["Labels"] = {name: value for name, value in config["Labels"].items() if name != REPLACE_LABEL}
    config["Labels"][NUMBER_LABEL] = str(number)
    config["HostConfig"] = copy.deepcopy(template["HostConfig"])
    new_name = copied_name(own_name, number)
    networks = template["NetworkSettings"]["Networks"]
    config["NetworkingConfig"] = {
        "EndpointsConfig": {
            name: {
                "Aliases": [
                    new_name if alias == own_name else alias for alias in network.get("Aliases") or () if alias != own_id
                ]
            }
            for name, network in networks.items()
        }
    }
    return config


def copied_name(name: str, number: int) -> str:
    """``kvrelay-decode-1`` → ``kvrelay-decode-3``."""
    stem, separator, last = name.rpartition("-")
    return f"{stem}-{number}" if separator and last.isdecimal() else f"{name}-{number}"
