"""The `kvrelay` command line. Nothing that is imported from here loads torch."""

from __future__ import annotations

import sys
from typing import Any

import typer

from cluster.commands.model import models_app
from cluster.commands.process import process_command
from cluster.commands.scale import scale
from cluster.commands.status import status
from cluster.commands.up import up_command
from cluster.console import error_console
from cluster.errors import ClusterError
from cluster.plugins import add_plugins, installed_plugins
from cluster.process_kinds import PROCESS_KINDS
from service_kit.errors import SettingsError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

USAGE_ERROR: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
"""Base of all that typer finds wrong with a command line; some versions of typer carry a click of their own."""


def make_app() -> typer.Typer:
    app = typer.Typer(
        name="kvrelay",
        help="LLM serving with prefill and decode on separate, separately scaled pools.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.command("up")(up_command())
    for kind in PROCESS_KINDS.values():
        app.command(kind.section)(process_command(kind))
    app.command("status")(status)
    app.command("scale")(scale)
    app.add_typer(models_app, name="models")
    add_plugins(app, installed_plugins())
    return app


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 2 when the command line or a setting is wrong, 1 when something fails."""
    try:
        result = make_app()(args=arguments, standalone_mode=False)
    except USAGE_ERROR as error:
        message = " ".join(error.format_message().split())
        return _complain(f"{message} (kvrelay --help says more)", EXIT_USAGE) if message else EXIT_USAGE
    except SettingsError as error:
        return _complain(str(error), EXIT_USAGE)
    except ClusterError as error:
        return _complain(str(error), EXIT_FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    return result if isinstance(result, int) else 0


def _complain(text: str, exit_code: int) -> int:
    error_console().print(f"kvrelay: {text}")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
