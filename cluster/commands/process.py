"""`kvrelay coordinator`, `prefill` and `decode`: one process, on a host of its own.

The command finds or makes the model, settles CPUs and threads, and then becomes the process: what runs is
``python -m decode_service`` with its settings in the environment, exactly as under `kvrelay up`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from cluster.commands.model import resolve_model
from cluster.options import SECRETS, option_leaves, with_options
from cluster.process_kinds import ALL_VARIABLES, ProcessKind
from service_kit.launch import launch_command
from service_kit.settings import load_settings, settings_environ, without_settings

DOCS = {
    "coordinator": "Start the coordinator: the OpenAI API, and where workers register.",
    "prefill": "Start one prefill worker.",
    "decode": "Start one decode worker.",
}


def process_command(kind: ProcessKind) -> Callable[..., None]:
    def run(given: dict[str, object]) -> None:
        command, environ = prepare_process(kind, given, os.environ)
        os.execve(command[0], command, environ)  # noqa: S606

    return with_options(option_leaves([kind.settings_type], hidden=SECRETS), run, DOCS[kind.section])


def prepare_process(
    kind: ProcessKind, given: Mapping[str, object], environ: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The command line and environment of the process.

    Raises:
        SettingsError, ModelError
    """

    def load(overrides: Mapping[str, object]) -> object:
        return load_settings(
            kind.settings_type, kind.section, overrides=overrides, environ=environ, known_variables=ALL_VARIABLES
        )

    settings = load(given)
    settings = load({**given, **resolve_model(settings, environ)})
    process = settings.process  # type: ignore[attr-defined]
    command = launch_command(kind.module, cpus=process.cpus, threads=process.threads)
    return command, without_settings(environ) | settings_environ(settings, kind.section)  # type: ignore[arg-type]
