"""What every process' `__main__` does: settings, logging, run, and one clear line when the start fails."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from service_kit.errors import ServiceError, SettingsError
from service_kit.logging import configure_logging
from service_kit.settings import load_settings
from service_kit.worker_settings import ProcessSettings
from transport.errors import TransportError

EXIT_FAILED = 1
EXIT_USAGE = 2

log = logging.getLogger(__name__)

SettingsT = TypeVar("SettingsT", bound=msgspec.Struct)


def run_main(
    section: str,
    settings_type: type[SettingsT],
    run: Callable[[SettingsT], int],
    environ: Mapping[str, str],
    *,
    process_of: Callable[[SettingsT], ProcessSettings],
    name_of: Callable[[SettingsT], str] = lambda settings: "",
    start_errors: tuple[type[Exception], ...] = (),
) -> int:
    """Returns the exit code: 2 for a setting that stops the start, 1 for anything else that does.

    Args:
        name_of: what the process is called in its log; "" = as its section.
        start_errors: exceptions of `run` that are told in one line, without a traceback.
    """
    try:
        settings = load_settings(settings_type, section, overrides={}, environ=environ)
    except SettingsError as error:
        sys.stderr.write(f"kvrelay {section}: {error}\n")
        return EXIT_USAGE
    process = process_of(settings)
    configure_logging(process.log_format, process.log_level, name_of(settings) or section)
    try:
        return run(settings)
    except SettingsError as error:
        log.error("%s", error)
        return EXIT_USAGE
    except (ServiceError, TransportError, *start_errors) as error:  # type: ignore[misc]  # mypy reads no unpacked tuple here
        log.error("cannot start: %s", error)
        return EXIT_FAILED
