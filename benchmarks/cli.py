"""`kvrelay bench`. The `kvrelay` command finds it by the entry point group `kvrelay.commands` (docs/adr/0016)."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.errors import SpecError
from benchmarks.experiments.results import ResultFolder, read_results
from benchmarks.experiments.session import restrict_to, run_experiment
from benchmarks.experiments.spec import load_experiment, ready_made
from benchmarks.report.compare import write_comparison
from benchmarks.report.write import write_report
from cluster.console import error_console, result_console
from service_kit.cpus import parse_cpus

PIPED_WIDTH = 160
OutOption = Annotated[Path | None, typer.Option(help="folder for the results; default: bench-EXPERIMENT-TIME here")]


def make_app() -> typer.Typer:
    app = typer.Typer(
        name="bench", no_args_is_help=True, help="Latency experiments: measure disaggregation, in one command."
    )
    app.command("run")(run)
    app.command("list")(list_experiments)
    app.command("report")(report)
    app.command("compare")(compare)
    return app


def run(
    experiment: Annotated[str, typer.Argument(help="a ready-made experiment (see `kvrelay bench list`) or a TOML file")],
    out: OutOption = None,
    repeats: Annotated[int | None, typer.Option(help="in place of the experiment's", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="in place of the experiment's", min=0)] = None,
    model: Annotated[str | None, typer.Option(help="in place of the experiment's")] = None,
    cpus: Annotated[str, typer.Option(help="CPUs for everything, such as 0-1; default: all")] = "",
    traces: Annotated[Path | None, typer.Option(help="folder with the public traces", envvar="BENCH_TRACES")] = None,
) -> None:
    """Run an experiment and write its report."""
    if cpus:
        try:
            restrict_to(parse_cpus(cpus))
        except (ValueError, OSError) as error:
            raise typer.BadParameter(f"cpus: {error}") from error
    given = {"repeats": repeats, "seed": seed, "model": model}
    spec = load_experiment(experiment, {name: value for name, value in given.items() if value is not None})
    folder = ResultFolder(out or Path(f"bench-{spec.name}-{datetime.now():%Y%m%d-%H%M%S}"))
    console = error_console()
    console.print(f"{spec.title}\n{spec.question}\nThis takes about {spec.planned_s / 60:.0f} minutes.")
    interrupted = False
    try:
        run_experiment(spec, folder, traces=traces, environ=os.environ, console=console)
    except KeyboardInterrupt:
        interrupted = True
        console.print("interrupted; reporting what there is")
    result_console().print(str(write_report(read_results(folder.directory), folder)))
    if interrupted:
        raise typer.Abort


def _wide_console() -> Console:
    """Tables keep their lines whole where the output is no terminal."""
    console = result_console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    return console


def list_experiments() -> None:
    """List the ready-made experiments, and how long each takes."""
    table = Table("experiment", "about", "topologies", "question", box=None, pad_edge=False)
    for name in ready_made():
        spec = load_experiment(name)
        topologies = ", ".join(spec.listed_names[:6]) + (" …" if len(spec.listed_names) > 6 else "")
        table.add_row(name, f"{spec.planned_s / 60:.0f} min", topologies, spec.question)
    _wide_console().print(table)


def report(
    directory: Annotated[Path, typer.Argument(help="a folder that `kvrelay bench run` made")],
) -> None:
    """Make the tables, plots and page of a run again from its raw records."""
    result_console().print(str(write_report(read_results(directory), ResultFolder(directory))))


def compare(
    a: Annotated[Path, typer.Argument(help="a folder that `kvrelay bench run` made")],
    b: Annotated[Path, typer.Argument(help="another one")],
    out: Annotated[Path | None, typer.Option(help="the page to write; default: A/compare-B.html")] = None,
) -> None:
    """Put two runs of an experiment side by side: what differs, by how much, and how sure that is."""
    for path in (a, b):
        if not path.is_dir():
            raise SpecError(f"there is no folder {path}")
    target = out or a / f"compare-{b.resolve().name}.html"
    table = write_comparison(read_results(a), read_results(b), a.name or str(a), b.name or str(b), target)
    console = _wide_console()
    console.print(table)
    console.print(str(target))
