"""What each process of a local cluster is started with: its command line and its environment.

Settings travel as variables (the cluster token among them: command lines are for everyone to read). Each child's settings
are loaded here first, so that a wrong one stops `kvrelay up` before anything runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.child_process import ProcessSpec
from cluster.cpu_plan import CpuShare, cpu_share, parse_cpu_lists
from cluster.process_kinds import ALL_VARIABLES, PROCESS_KINDS, ProcessKind
from cluster.supervisor import COORDINATOR
from cluster.up_settings import UpSettings
from service_kit.cpus import available_cpus, format_cpus
from service_kit.launch import launch_command
from service_kit.settings import leaves_of, load_settings, settings_environ, without_settings
from wire.control import Role

CONTROL_ADDRESS_SOCKET = "workers.sock"


class ProcessSpecs:
    """Maps a process' name to how it is started, for one cluster."""

    def __init__(
        self,
        settings: UpSettings,
        *,
        directory: Path,
        environ: Mapping[str, str],
        shared: Mapping[str, object],
        cluster_token: str,
    ) -> None:
        """
        Args:
            directory: for sockets.
            shared: flat settings given to every process that has them: from the command line, the model, the port.
        """
        self._settings = settings
        self._environ = environ
        self._shared = shared
        self._own = {"cluster_token": cluster_token}
        self._control = f"ipc://{directory / CONTROL_ADDRESS_SOCKET}"
        self._num_cpus = len(available_cpus())
        self._cpu_lists = {
            Role.PREFILL: parse_cpu_lists(settings.prefill_cpus),
            Role.DECODE: parse_cpu_lists(settings.decode_cpus),
        }

    def __call__(self, name: str) -> ProcessSpec:
        """
        Raises:
            SettingsError: the process would refuse its settings.
        """
        kind, settings, share = self.settings_of(name)
        cpus = format_cpus(share.cpus)
        command = launch_command(kind.module, parent_pid=os.getpid(), cpus=cpus, threads=share.threads)
        return ProcessSpec(tuple(command), without_settings(self._environ) | settings_environ(settings, kind.section))

    def settings_of(self, name: str) -> tuple[ProcessKind, Any, CpuShare]:
        if name == COORDINATOR:
            kind, share, own = PROCESS_KINDS[COORDINATOR], self._coordinator_share(), {"control": self._control}
        else:
            role_name, _, index = name.rpartition("-")
            role = Role(role_name)
            kind, share = PROCESS_KINDS[role_name], self._worker_share(role, int(index))
            own = {"worker_id": name, "coordinator": self._control}
        known = {leaf.name for leaf in leaves_of(kind.settings_type)}
        overrides = {key: value for key, value in self._shared.items() if key in known} | own | self._own
        overrides["cpus"] = format_cpus(share.cpus)
        settings = self._load(kind, overrides)
        if settings.process.threads is None:
            settings = self._load(kind, overrides | {"threads": share.threads})
        return kind, settings, CpuShare(share.cpus, settings.process.threads)

    def _load(self, kind: ProcessKind, overrides: Mapping[str, object]) -> Any:
        return load_settings(
            kind.settings_type, kind.section, overrides=overrides, environ=self._environ, known_variables=ALL_VARIABLES
        )

    def _worker_share(self, role: Role, index: int) -> CpuShare:
        counts = {Role.PREFILL: self._settings.prefill, Role.DECODE: self._settings.decode}
        return cpu_share(self._cpu_lists[role], index, max(1, counts[role]), self._num_cpus, sum(counts.values()))

    def _coordinator_share(self) -> CpuShare:
        """It computes nothing heavy: tokenising and detokenising use no numeric library."""
        lists = parse_cpu_lists(self._settings.coordinator_cpus)
        return CpuShare(lists[0] if lists else (), 1)
