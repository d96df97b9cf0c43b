"""`kvrelay models`, and how every other command gets from `--model` to a directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cluster.console import error_console, progress_bar, result_console
from cluster.model_source import BUILT_IN
from cluster.model_store import ModelStore, cache_directory
from cluster.model_tools import SubprocessTools
from cluster.step_protocol import OnProgress

models_app = typer.Typer(invoke_without_command=True, help="List, fetch and convert models.")


def model_store(environ: Mapping[str, str]) -> ModelStore:
    return ModelStore(cache_directory(environ), SubprocessTools(environ))


def resolve_model(settings: Any, environ: Mapping[str, str]) -> dict[str, object]:
    """The settings `model_dir` and `served_model` of a process, worked out where they were not given.

    Args:
        settings: a coordinator's, or a worker's.

    Raises:
        ModelError
    """
    chosen = getattr(settings, "worker", settings)
    if chosen.model_dir is not None:
        return {"served_model": chosen.served_model or chosen.model_dir.name}
    with progress_bar(error_console()) as on_progress:
        resolved = model_store(environ).resolve(chosen.model, on_progress)
    return {"model_dir": str(resolved.directory), "served_model": chosen.served_model or resolved.served_name}


@models_app.callback()
def list_models(context: typer.Context) -> None:
    """List the models that are ready in the cache, and those that can be fetched by name."""
    if context.invoked_subcommand is not None:
        return
    store = model_store(os.environ)
    table = Table("name", "family", "size", "directory", box=None, pad_edge=False)
    for model in store.list():
        table.add_row(model.name, model.family, f"{model.num_bytes / 2**20:.0f} MiB", str(model.directory))
    cached = {model.name for model in store.list()}
    for name in sorted(BUILT_IN.keys() - cached):
        table.add_row(name, "", "", "not fetched yet: kvrelay models fetch " + name)
    result_console().print(table)


@models_app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="a known name, a hub id (org/name), a directory or a .gguf file")],
) -> None:
    """Fetch a model, and convert it where needed, so that a later start finds it."""
    with progress_bar(error_console()) as on_progress:
        resolved = model_store(os.environ).resolve(name, on_progress)
    result_console().print(str(resolved.directory))


@models_app.command()
def convert(
    source: Annotated[str, typer.Argument(help="a directory or a .gguf file")],
    target: Annotated[Path, typer.Argument(help="the directory to make")],
) -> None:
    """Convert a model into a directory that workers read."""
    with progress_bar(error_console()) as on_progress:
        _convert(source, target, on_progress)
    result_console().print(str(target))


def _convert(source: str, target: Path, on_progress: OnProgress) -> None:
    model_store(os.environ).convert(source, target, on_progress)
