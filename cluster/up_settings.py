"""Settings of `kvrelay up` itself; all others of its options belong to the processes that it starts."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from cluster.cpu_plan import parse_cpu_lists

NumWorkers = Annotated[int, Meta(ge=0, le=256)]


class UpSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prefill: Annotated[NumWorkers, Meta(description="number of prefill workers")] = 1
    decode: Annotated[int, Meta(ge=1, le=256, description="number of decode workers")] = 1
    prefill_cpus: Annotated[str, Meta(description='CPUs of prefill workers: 0-3 to share, or "0;1" for one each')] = ""
    decode_cpus: Annotated[str, Meta(description='CPUs of decode workers: 0-3 to share, or "0;1" for one each')] = ""
    coordinator_cpus: Annotated[str, Meta(description="CPUs of the coordinator, such as 0-1")] = ""
    start_s: Annotated[float, Meta(gt=0, description="seconds that the cluster may take to come up")] = 120.0

    def __post_init__(self) -> None:
        for name in ("prefill_cpus", "decode_cpus", "coordinator_cpus"):
            try:
                lists = parse_cpu_lists(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            if name == "coordinator_cpus" and len(lists) > 1:
                raise ValueError(f"{name}: one list of CPUs is enough")
