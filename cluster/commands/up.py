"""`kvrelay up`: a whole cluster on this machine, until Ctrl-C."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cluster.commands.model import resolve_model
from cluster.console import ProcessLines, error_console, result_console
from cluster.errors import ClusterError
from cluster.local_cluster import LocalCluster
from cluster.options import SECRETS, option_leaves, with_options
from cluster.process_kinds import ALL_VARIABLES, PROCESS_KINDS
from cluster.process_specs import ProcessSpecs
from cluster.run_directory import run_directory
from cluster.supervisor import COORDINATOR, RestartPolicy, worker_name
from cluster.up_settings import UpSettings
from coordinator.settings import CoordinatorSettings
from service_kit.lifecycle import Lifecycle
from service_kit.logging import configure_logging
from service_kit.settings import leaves_of, load_settings
from transport.shm_segment import unlink_orphans
from wire.control import Role

log = logging.getLogger("kvrelay")

PER_PROCESS = (
    "worker_id",
    "coordinator",
    "control",
    "cpus",
    "http_host",
    "http_port",
    "listen",
    "advertise_host",
)
"""Settings that differ between processes: `up` chooses them."""

STOP_MARGIN_S = 5.0
"""Behind a process' own drain deadline, until it is killed."""


def up_command() -> Callable[..., None]:
    types: list[Any] = [UpSettings, *(kind.settings_type for kind in PROCESS_KINDS.values())]
    doc = "Start a cluster on this machine: one coordinator, prefill and decode workers. Ctrl-C drains and ends it."
    return with_options(option_leaves(types, hidden=PER_PROCESS + SECRETS), run_up, doc)


def run_up(given: dict[str, object]) -> None:
    code = up(given, os.environ)
    if code:
        raise SystemExit(code)


def up(given: Mapping[str, object], environ: Mapping[str, str]) -> int:
    """Returns the exit code.

    Raises:
        SettingsError, ClusterError
    """
    own = {leaf.name for leaf in leaves_of(UpSettings)}
    up_given = {name: value for name, value in given.items() if name in own}
    shared = {name: value for name, value in given.items() if name not in own}
    settings = _load(UpSettings, "up", up_given, environ)
    front = _front_settings(shared, environ)
    log_format = front.process.log_format
    if log_format == "auto":
        log_format = "human" if sys.stderr.isatty() else "json"
    configure_logging(log_format, front.process.log_level, "kvrelay")
    _check_processes(settings, shared, environ)
    port = _free_port(front.host, front.port)
    token = environ.get("KVRELAY_CLUSTER_TOKEN") or secrets.token_urlsafe(32)
    shared |= {"port": port, "log_format": log_format}
    with run_directory(port, environ) as directory:
        shared |= resolve_model(front, environ)
        front = _front_settings(shared, environ)
        specs = ProcessSpecs(settings, directory=directory, environ=environ, shared=shared, cluster_token=token)
        desired = {Role.PREFILL: settings.prefill, Role.DECODE: settings.decode}
        url = local_url(front.host, port)
        stop_s = front.process.drain_s + STOP_MARGIN_S
        lines = ProcessLines(error_console(), prefixed=log_format == "human")
        cluster = LocalCluster(
            directory=directory,
            port=port,
            url=url,
            desired=desired,
            policy=RestartPolicy(start_s=settings.start_s, stop_s=stop_s),
            spec_of=specs,
            on_line=lines.write,
            on_report=log.info,
            on_up=lambda: announce(url, settings, front),
        )
        try:
            return Lifecycle(drain_s=2 * stop_s + STOP_MARGIN_S).run(cluster.run)
        finally:
            unlink_orphans()  # of workers that were killed


def announce(url: str, settings: UpSettings, front: CoordinatorSettings) -> None:
    console = result_console()
    workers = f"{settings.prefill} prefill, {settings.decode} decode"
    console.print(f"kvrelay is ready: {url} ({workers}, model {front.served_model})")
    console.print("Try it:")
    console.print(f"  {curl_line(url, front)}")


def curl_line(url: str, front: CoordinatorSettings) -> str:
    body = {
        "model": front.served_model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "stream": True,
    }
    key = "-H 'Authorization: Bearer YOUR_KEY' " if front.api_keys else ""
    return f"curl -N {url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"


def local_url(host: str, port: int) -> str:
    """Where this machine reaches a server that listens on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def _check_processes(settings: UpSettings, shared: Mapping[str, object], environ: Mapping[str, str]) -> None:
    """What would stop a process stops us: before a port is tried, a model fetched, or anything runs."""
    specs = ProcessSpecs(settings, directory=Path(), environ=environ, shared=shared, cluster_token="")
    for name in (COORDINATOR, worker_name(Role.PREFILL, 0), worker_name(Role.DECODE, 0)):
        specs.settings_of(name)


def _front_settings(shared: Mapping[str, object], environ: Mapping[str, str]) -> CoordinatorSettings:
    known = {leaf.name for leaf in leaves_of(CoordinatorSettings)}
    given = {name: value for name, value in shared.items() if name in known}
    settings: CoordinatorSettings = _load(CoordinatorSettings, COORDINATOR, given, environ)
    return settings


def _load(settings_type: type[Any], section: str, given: Mapping[str, object], environ: Mapping[str, str]) -> Any:
    return load_settings(settings_type, section, overrides=given, environ=environ, known_variables=ALL_VARIABLES)


def _free_port(host: str, port: int) -> int:
    """`port`, or any free one for 0. Restarts of the coordinator keep it.

    Raises:
        ClusterError: it is in use, or the host is not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ClusterError(f"port: cannot listen on {host}:{port}: {error.strerror or error}") from error
        return int(probe.getsockname()[1])
