"""`python -m decode_service`: a decode worker with settings from the environment (what `kvrelay decode` becomes)."""

from __future__ import annotations

import os
import sys

from decode_service.main import run
from decode_service.settings import DecodeSettings
from engine.errors import EngineError
from service_kit.main import run_main

START_ERRORS = (EngineError, ValueError)

if __name__ == "__main__":
    sys.exit(
        run_main(
            "decode",
            DecodeSettings,
            run,
            os.environ,
            process_of=lambda settings: settings.process,
            name_of=lambda settings: settings.worker.worker_id,
            start_errors=START_ERRORS,
        )
    )
