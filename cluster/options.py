"""Command-line options made of settings, so that an option, a variable and a TOML key are one thing, described once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Annotated, Any, get_args

import msgspec
import typer

from service_kit.settings import Leaf, leaves_of, option_name

SECRETS = ("cluster_token", "api_keys")
"""Settings that never come from a command line, which every user of a machine may read."""


def option_leaves(settings_types: Iterable[type[msgspec.Struct]], hidden: Collection[str] = ()) -> list[Leaf]:
    """The settings of several processes, each name once."""
    leaves: dict[str, Leaf] = {}
    for settings_type in settings_types:
        for leaf in leaves_of(settings_type):
            if leaf.name not in hidden:
                leaves.setdefault(leaf.name, leaf)
    return list(leaves.values())


def with_options(leaves: Iterable[Leaf], run: Callable[[dict[str, object]], None], doc: str) -> Callable[..., None]:
    """A function for typer that has one option per setting and calls `run` with what was given, by flat name.

    Values stay text: `load_settings` converts and checks them, whichever way they came.
    """

    def command(**given: object) -> None:
        run({name: value for name, value in given.items() if value is not None})

    parameters = []
    for leaf in leaves:
        flag = f"--{option_name(leaf.name)}"
        is_flag = leaf.type is bool or get_args(leaf.type)[:1] == (bool,)
        names = [f"{flag}/--no-{option_name(leaf.name)}"] if is_flag else [flag]
        option = typer.Option(*names, help=_help(leaf), metavar=None if is_flag else _metavar(leaf), show_default=False)
        annotation: Any = Annotated[bool | None, option] if is_flag else Annotated[str | None, option]
        parameters.append(inspect.Parameter(leaf.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = doc
    return command


def _help(leaf: Leaf) -> str:
    default: Any = leaf.default
    if default in (None, "", ()) or default is msgspec.NODEFAULT:
        return leaf.description
    if isinstance(default, bool):
        default = "yes" if default else "no"
    elif isinstance(default, tuple):
        default = ",".join(str(item) for item in default)
    return f"{leaf.description} [default: {default}]"


def _metavar(leaf: Leaf) -> str:
    plain = get_args(leaf.type)[0] if hasattr(leaf.type, "__metadata__") else leaf.type
    choices = get_args(plain)
    if choices and all(isinstance(choice, str) for choice in choices):
        return "|".join(choices)
    return "VALUE"
