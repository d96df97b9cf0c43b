"""Settings of a prefill worker."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from service_kit.worker_settings import EngineSettings, ProcessSettings, WorkerSettings


class PrefillSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    process: ProcessSettings = ProcessSettings()
    worker: WorkerSettings = WorkerSettings()
    engine: EngineSettings = EngineSettings()
    kv_wire_dtype: Annotated[
        Literal["native", "int8", "fp8"],
        Meta(description="of KV on its way to decode workers; int8 and fp8 are half as many bytes as bfloat16, and lossy"),
    ] = "native"
