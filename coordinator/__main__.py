"""`python -m coordinator`: a coordinator with settings from the environment (what `kvrelay coordinator` becomes)."""

from __future__ import annotations

import os
import sys

from coordinator.main import run
from coordinator.settings import CoordinatorSettings
from service_kit.main import run_main

START_ERRORS = (OSError, ValueError)

if __name__ == "__main__":
    sys.exit(
        run_main(
            "coordinator",
            CoordinatorSettings,
            run,
            os.environ,
            process_of=lambda settings: settings.process,
            start_errors=START_ERRORS,
        )
    )
