"""Commands of `kvrelay` that live above this package: each is an entry point of the group `kvrelay.commands`.

An entry point names a function that makes a typer application. It is loaded only when its command is called, so that no
other command pays for its imports, and an installation without its extra loses nothing else (docs/adr/0016).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable

import typer

from cluster.errors import ClusterError

GROUP = "kvrelay.commands"
FORWARDED = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def add_plugins(app: typer.Typer, entry_points: Iterable[importlib.metadata.EntryPoint]) -> None:
    """One command per entry point, which hands its whole command line on."""
    for entry_point in entry_points:
        app.command(entry_point.name, context_settings=FORWARDED, help=_help(entry_point))(_forward(entry_point))


def installed_plugins() -> list[importlib.metadata.EntryPoint]:
    return sorted(importlib.metadata.entry_points(group=GROUP), key=lambda one: one.name)


def _forward(entry_point: importlib.metadata.EntryPoint) -> Callable[[typer.Context], object]:
    def command(context: typer.Context) -> object:
        return load_plugin(entry_point)(args=context.args, prog_name=context.command_path, standalone_mode=False)

    return command


def load_plugin(entry_point: importlib.metadata.EntryPoint) -> typer.Typer:
    """
    Raises:
        ClusterError: a package that it needs is not installed.
    """
    try:
        make_app: Callable[[], typer.Typer] = entry_point.load()
    except ModuleNotFoundError as error:
        name = entry_point.name
        raise ClusterError(f"kvrelay {name} needs the package {error.name}: pip install 'kvrelay[{name}]'") from error
    return make_app()


def _help(entry_point: importlib.metadata.EntryPoint) -> str:
    return f"From {entry_point.module}; see kvrelay {entry_point.name} --help."
