"""`kvrelay scale prefill=2 decode=3`: more or fewer workers in a running cluster, of processes or of containers."""

from __future__ import annotations

import asyncio
import os
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from cluster.console import error_console, result_console
from cluster.control_socket import ScaleRequest, ask
from cluster.docker_backend import scale_project
from cluster.run_directory import find_cluster
from wire.control import Role

DEFAULT_PROJECT = "kvrelay"  # the name in compose.yaml


class Backend(Enum):
    LOCAL = "local"
    DOCKER = "docker"


def scale(
    counts: Annotated[
        list[str], typer.Argument(help="wanted numbers, such as prefill=2 decode=3", metavar="ROLE=NUMBER...")
    ],
    backend: Annotated[
        Backend, typer.Option(help="local: a cluster of `kvrelay up`; docker: the containers of a Compose project")
    ] = Backend.LOCAL,
    port: Annotated[int | None, typer.Option(help="local: the cluster's port, where several run")] = None,
    project: Annotated[
        str, typer.Option(help="docker: name of the Compose project", envvar="COMPOSE_PROJECT_NAME")
    ] = DEFAULT_PROJECT,
    timeout: Annotated[float, typer.Option(help="seconds to wait until it is done", min=1)] = 120.0,
) -> None:
    """Start more workers, or drain the highest-numbered ones, and wait until that is done."""
    wanted = parse_counts(counts)
    if backend is Backend.DOCKER:
        if port is not None:
            raise typer.BadParameter("--port is for --backend local; give --project")
        running = scale_project(project, wanted, timeout, error_console().print)
        text = f"{running[Role.PREFILL]} prefill and {running[Role.DECODE]} decode workers run"
    else:
        record = find_cluster(port, os.environ)
        request = ScaleRequest(prefill=wanted.get(Role.PREFILL), decode=wanted.get(Role.DECODE), deadline_s=timeout)
        text = asyncio.run(ask(Path(record.control), request, error_console().print)).text
    result_console().print(text)


def parse_counts(texts: list[str]) -> dict[Role, int]:
    """
    Raises:
        typer.BadParameter: not of the form role=number, or a role twice.
    """
    roles = {role.value: role for role in Role}
    counts: dict[Role, int] = {}
    for text in texts:
        name, _, number = text.partition("=")
        if name not in roles or not number.isdecimal():
            raise typer.BadParameter(f"{text!r} is not of the form prefill=2 or decode=3")
        if roles[name] in counts:
            raise typer.BadParameter(f"{name} is given twice")
        counts[roles[name]] = int(number)
    return counts
