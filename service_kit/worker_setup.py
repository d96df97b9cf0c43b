"""What the composition roots of both workers make of their settings."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

from service_kit.cpus import available_cpus
from service_kit.errors import SettingsError
from service_kit.worker_settings import WorkerSettings
from transport.base import Transport
from transport.curve import keys_of
from transport.fault_rules import FaultPlan, parse_rule
from transport.faults import FaultyTransport
from transport.options import TransportOptions
from transport.registry import create_transport
from wire.control import Endpoint, Role, WorkerInfo
from wire.ids import Incarnation, WorkerId
from wire.kv_layout import Fingerprint, KvLayout

log = logging.getLogger(__name__)


class ServedModel(Protocol):
    """What a coordinator is told of a worker's model and memory (`engine.build.EngineShape` has it)."""

    @property
    def fingerprint(self) -> Fingerprint: ...
    @property
    def layout(self) -> KvLayout: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


def require_model_dir(settings: WorkerSettings, role: Role) -> Path:
    """
    Raises:
        SettingsError: no converted model was given (the command line finds or makes one).
    """
    if settings.model_dir is None:
        raise SettingsError("model_dir", role.value, "is required here: the directory of a converted model")
    return settings.model_dir


def worker_info(
    settings: WorkerSettings,
    role: Role,
    incarnation: Incarnation,
    model: ServedModel,
    max_num_sequences: int,
    endpoints: tuple[Endpoint, ...],
) -> WorkerInfo:
    return WorkerInfo(
        worker_id=worker_id(settings, role),
        incarnation=incarnation,
        role=role,
        model=settings.served_model or settings.model,
        fingerprint=model.fingerprint,
        block_size=model.layout.block_size,
        num_blocks=model.num_blocks,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        max_num_sequences=max_num_sequences,
        endpoints=endpoints,
        host=socket.gethostname(),
        pid=os.getpid(),
        cpus=available_cpus(),
    )


def worker_id(settings: WorkerSettings, role: Role) -> WorkerId:
    return WorkerId(settings.worker_id or f"{role.value}-{socket.gethostname()}-{os.getpid()}")


def fault_plan(settings: WorkerSettings) -> FaultPlan | None:
    """What shall go wrong on purpose; None, as everywhere in production: nothing."""
    if not settings.faults and settings.faults_file is None:
        return None
    log.warning(
        "FAULT INJECTION IS ON (faults, faults_file): messages and KV will be lost, delayed or damaged on purpose: %s; %s",
        ", ".join(settings.faults) or "no fixed rules",
        settings.faults_file or "no file",
    )
    rules = [parse_rule(text) for text in settings.faults]
    return FaultPlan(rules, time.monotonic, settings.faults_file)


class LinkSecurity(Protocol):
    """The settings of any process that say how its links are protected."""

    @property
    def cluster_token(self) -> str: ...
    @property
    def encrypt(self) -> bool: ...


def transport_options(settings: LinkSecurity) -> TransportOptions:
    """
    Raises:
        SettingsError: the cluster token cannot be made a key of.
    """
    if not settings.encrypt:
        return TransportOptions()
    try:
        keys = keys_of(settings.cluster_token)
    except ValueError as error:
        raise SettingsError("cluster_token", "encrypt", str(error).removeprefix("cluster_token: ")) from error
    return TransportOptions(curve_server_secret=keys.secret, curve_server_public=keys.public)


def open_transports(
    stack: AsyncExitStack,
    schemes: Iterable[str],
    options: TransportOptions,
    faults: FaultPlan | None = None,
    link: str = "handoff",
) -> dict[str, Transport]:
    """One transport per scheme, in that order, closed by `stack`.

    Args:
        faults: wraps each of them; its rules for `link` strike here.
    """
    transports: dict[str, Transport] = {}
    for scheme in schemes:
        transport = create_transport(scheme, options)
        stack.push_async_callback(transport.close)
        transports[scheme] = transport if faults is None else FaultyTransport(transport, faults, link)
    return transports
