"""What all plots share: size, fonts, one colour per topology, and how they are written."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F3C8D", "#5D5D5D")
"""Okabe and Ito's colours, told apart by colour-blind readers, and two more."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
INVALID = "#B00020"
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.hashsalt": "kvrelay",
    "figure.dpi": 110,
}
WIDTH_IN = 10.0


@dataclass(frozen=True)
class Plot:
    """One of the page's plots. `figure` is None where the experiment has nothing to show; `why` says why."""

    key: str
    title: str
    reading: str  # how to read it
    figure: Figure | None = None
    why: str = ""


class Colours:
    def __init__(self, names: Sequence[str]) -> None:
        self._order = list(names)

    def colour(self, name: str) -> str:
        return PALETTE[self._order.index(name) % len(PALETTE)]

    def marker(self, name: str) -> str:
        return MARKERS[self._order.index(name) % len(MARKERS)]


def grid(
    rows: int, columns: int, height_in: float, *, share_y: bool = False, share_x: bool = False
) -> tuple[Figure, list[list[Axes]]]:
    """A figure of the page's width; every row is `height_in` high."""
    figure = Figure(figsize=(WIDTH_IN, rows * height_in), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=share_y, sharex=share_x)
    return figure, [list(row) for row in axes]


@contextmanager
def style() -> Iterator[None]:
    with mpl.rc_context(STYLE):
        yield


def plain_log(axis: Axis) -> None:
    """Ticks at 1, 2 and 5 times powers of ten, written out; call it once the data are drawn."""
    low, high = sorted(axis.get_view_interval())
    wide = low <= 0 or high / low > 300
    axis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def legend_below(figure: Figure, axes: Axes) -> None:
    """One legend for all panels, under them."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(handles)))


def svg_text(figure: Figure) -> str:
    """To be put into a page: without the XML head, scaled to the page's width."""
    buffer = io.StringIO()
    with style():
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def save(figure: Figure, directory: Path, key: str) -> str:
    """Write SVG and PNG; returns the SVG for the page."""
    directory.mkdir(parents=True, exist_ok=True)
    text = svg_text(figure)
    (directory / f"{key}.svg").write_text(text, encoding="utf-8")
    figure.set_layout_engine("none")  # the layout is done, and costs most of a rendering
    with style():
        figure.savefig(directory / f"{key}.png", dpi=130)
    return text
