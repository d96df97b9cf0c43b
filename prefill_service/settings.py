"""Settings of a prefill worker."""

from __future__ import annotations

import msgspec

from service_kit.worker_settings import EngineSettings, ProcessSettings, WorkerSettings


class PrefillSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    process: ProcessSettings = ProcessSettings()
    worker: WorkerSettings = WorkerSettings()
    engine: EngineSettings = EngineSettings()
