"""`python -m prefill_service`: a prefill worker with settings from the environment (what `kvrelay prefill` becomes)."""

from __future__ import annotations

import os
import sys

from engine.errors import EngineError
from prefill_service.main import run
from prefill_service.settings import PrefillSettings
from service_kit.main import run_main

START_ERRORS = (EngineError, ValueError)

if __name__ == "__main__":
    sys.exit(
        run_main(
            "prefill",
            PrefillSettings,
            run,
            os.environ,
            process_of=lambda settings: settings.process,
            name_of=lambda settings: settings.worker.worker_id,
            start_errors=START_ERRORS,
        )
    )
