"""The kinds of processes that make a cluster, by the name of their section of the settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cluster.up_settings import UpSettings
from coordinator.settings import CoordinatorSettings
from decode_service.settings import DecodeSettings
from prefill_service.settings import PrefillSettings
from service_kit.settings import variable_names


@dataclass(frozen=True, slots=True)
class ProcessKind:
    section: str
    module: str  # what `python -m` runs
    settings_type: type[Any]


PROCESS_KINDS = {
    "coordinator": ProcessKind("coordinator", "coordinator", CoordinatorSettings),
    "prefill": ProcessKind("prefill", "prefill_service", PrefillSettings),
    "decode": ProcessKind("decode", "decode_service", DecodeSettings),
}

ALL_VARIABLES = frozenset(
    variable_names(UpSettings).union(*(variable_names(kind.settings_type) for kind in PROCESS_KINDS.values()))
)
"""Variables without a section that some process of a cluster understands."""
