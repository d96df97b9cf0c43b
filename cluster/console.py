"""What `kvrelay` writes: results to standard output, everything else to standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.step_protocol import OnProgress

COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")


def result_console() -> Console:
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def error_console() -> Console:
    return Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


class ProcessLines:
    """Lines of several processes on one terminal, each behind its process' name."""

    def __init__(self, console: Console, *, prefixed: bool) -> None:
        """
        Args:
            prefixed: False for JSON lines, which name their process themselves.
        """
        self._console = console
        self._prefixed = prefixed
        self._colours: dict[str, str] = {}

    def write(self, name: str, line: str) -> None:
        if not self._prefixed:
            self._console.print(line)
            return
        colour = self._colours.setdefault(name, COLOURS[len(self._colours) % len(COLOURS)])
        self._console.print(f"{name:>11} │ ", style=colour, end="")
        self._console.print(line)


@contextmanager
def progress_bar(console: Console) -> Iterator[OnProgress]:
    """A bar while something long goes on; on anything but a terminal, a line per stage. Nothing until the first call."""
    if not console.is_terminal:
        stages: set[str] = set()

        def print_stage(stage: str, fraction: float) -> None:
            if stage not in stages:
                stages.add(stage)
                console.print(f"model: {stage}")

        yield print_stage
        return
    columns = (
        TextColumn("model: {task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1.0, visible=False)
        yield lambda stage, fraction: progress.update(task, description=stage, completed=fraction, visible=True)
