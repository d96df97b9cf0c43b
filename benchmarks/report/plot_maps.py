"""Heat maps: over the numbers of prefill and decode workers, and over prompt length and load."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from benchmarks.load.records import Point
from benchmarks.report.figure import Colours, Plot, grid
from benchmarks.report.plot_rates import verdicts
from benchmarks.report.study import Group, Study, pooled
from benchmarks.stats.request_metrics import e2e_s, gaps_s, ttft_s
from benchmarks.stats.summary import share
from benchmarks.topologies.spec import Kvrelay

RATIO_LIMIT = 4.0


def workers(study: Study, colours: Colours) -> Plot:
    plot = Plot(
        "6-workers",
        "Over the numbers of prefill and decode workers",
        "Goodput in requests per second where the experiment searched it (mean over repeats), else attainment at the "
        "highest load. In brackets: per worker. Row 0: colocated.",
    )
    places = {one.name: (one.prefill, one.decode) for one in study.topologies if isinstance(one, Kvrelay)}
    values, what = _goodputs(study)
    if not values:
        values, what = _attainments(study)
    values = {name: value for name, value in values.items() if name in places}
    if not values:
        return Plot(plot.key, plot.title, plot.reading, None, "no cluster of ours was judged by an SLO")
    prefills = sorted({places[name][0] for name in values})
    decodes = sorted({places[name][1] for name in values})
    table = np.full((len(prefills), len(decodes)), np.nan)
    texts = [["" for _ in decodes] for _ in prefills]
    for name, value in values.items():
        prefill, decode = places[name]
        row, column = prefills.index(prefill), decodes.index(decode)
        if not math.isnan(table[row, column]) and table[row, column] >= value:
            continue  # several topologies of one shape: the best one stands for it
        table[row, column] = value
        per = f"\n({value / (prefill + decode):.2f})" if what == "goodput, requests/s" else ""
        texts[row][column] = f"{value:.2f}{per}"
    figure, rows = grid(1, 1, max(2.6, 1.0 + 0.75 * len(prefills)))
    axes = rows[0][0]
    _cells(axes, table, texts, "viridis", float(np.nanmin(table)), float(np.nanmax(table)))
    axes.set(title=what, xlabel="decode workers", ylabel="prefill workers")
    axes.set_xticks(range(len(decodes)), [str(one) for one in decodes])
    axes.set_yticks(range(len(prefills)), [str(one) for one in prefills])
    return Plot(plot.key, plot.title, plot.reading, figure)


def _goodputs(study: Study) -> tuple[dict[str, float], str]:
    found: dict[str, list[float]] = {}
    for row in study.manifest.goodputs:
        if row.prompt_tokens is None:
            found.setdefault(row.topology, []).append(row.met or 0.0)
    return {name: float(np.mean(values)) for name, values in found.items()}, "goodput, requests/s"


def _attainments(study: Study) -> tuple[dict[str, float], str]:
    parts = study.steady_parts()
    if not parts:
        return {}, ""
    part = parts[0]
    load = max((group.point.load for group in study.groups_of(part)), default=0.0)
    found = {}
    for group in study.groups_of(part):
        attained = share([one.both for one in verdicts(study, group)])
        if group.point.load == load and attained is not None:
            found[group.topology] = attained
    return found, f"attainment, {part.name} at load {load:g}"


def where_splitting_wins(study: Study, colours: Colours) -> Plot:
    plot = Plot(
        "8-crossover",
        "Where splitting wins: prompt length and load",
        "The first split topology's latency over the best colocated one's, cell by cell. Blue, below 1: splitting wins. "
        "Red: it loses. A star: the split one was past saturation there; a circle: every colocated one was.",
    )
    split = next((one.name for one in study.topologies if one.is_split), None)
    others = [one.name for one in study.topologies if isinstance(one, Kvrelay) and not one.is_split]
    parts = [part for part in study.parts.values() if part.prompt_tokens and study.groups_of(part)]
    if split is None or not others or not parts:
        return Plot(plot.key, plot.title, plot.reading, None, "needs a split and a colocated topology, and prompt lengths")
    part = parts[0]
    points = study.points_of(part)
    lengths = sorted({point.prompt_tokens or 0 for point in points})
    loads = sorted({point.load for point in points})
    metrics: tuple[tuple[str, Callable[[Group], float]], ...] = (
        ("p99 ITL", lambda group: _percentile(pooled(study.series(group, gaps_s)), 99)),
        ("p90 TTFT", lambda group: _percentile(pooled(study.values(group, ttft_s)), 90)),
        ("p90 E2E", lambda group: _percentile(pooled(study.values(group, e2e_s)), 90)),
    )
    figure, rows = grid(1, len(metrics), max(3.0, 1.2 + 0.6 * len(lengths)), share_y=True)
    for (name, measure), axes in zip(metrics, rows[0], strict=True):
        table = np.full((len(lengths), len(loads)), np.nan)
        texts = [["" for _ in loads] for _ in lengths]
        for point in points:
            row, column = lengths.index(point.prompt_tokens or 0), loads.index(point.load)
            ratio, note = _ratio(study, part.name, point, split, others, measure)
            if ratio is not None:
                table[row, column] = math.log2(ratio)
                texts[row][column] = f"{ratio:.2f}{note}"
        limit = math.log2(RATIO_LIMIT)
        _cells(axes, table, texts, "RdBu_r", -limit, limit)
        rate = part.offered_rate(1.0)
        labels = [f"{load * rate:.3g}" if rate is not None else f"load {load:g}" for load in loads]
        axes.set(title=f"{name}: {split} / best of {', '.join(others)}", xlabel="requests/s offered" if rate else "")
        axes.title.set_fontsize(8.5)
        axes.set_xticks(range(len(loads)), labels)
        axes.set_yticks(range(len(lengths)), [str(length) for length in lengths])
    rows[0][0].set_ylabel("prompt tokens")
    return Plot(plot.key, plot.title, plot.reading, figure)


def _ratio(
    study: Study, part: str, point: Point, split: str, others: list[str], measure: Callable[[Group], float]
) -> tuple[float | None, str]:
    groups = {group.topology: group for group in study.at(study.parts[part], point)}
    against = [groups[name] for name in others if name in groups]
    if split not in groups or not against:
        return None, ""
    below = min(measure(group) for group in against)
    above = measure(groups[split])
    if not below > 0 or not above > 0:
        return None, ""
    note = ("*" if groups[split].saturated else "") + ("°" if all(group.saturated for group in against) else "")
    return above / below, note


def _percentile(seconds: NDArray[np.float64], percent: float) -> float:
    return float(np.percentile(seconds, percent)) if len(seconds) else math.nan


def _cells(axes: Axes, table: NDArray[np.float64], texts: list[list[str]], colours: str, low: float, high: float) -> None:
    if low == high:
        low, high = low - 0.5, high + 0.5
    axes.imshow(table, cmap=colours, vmin=low, vmax=high, aspect="auto", origin="lower")
    axes.grid(visible=False)
    middle, reach = (low + high) / 2, (high - low) / 2
    for row, cells in enumerate(texts):
        for column, text in enumerate(cells):
            value = table[row, column]
            diverging = colours == "RdBu_r"
            dark = abs(value - middle) > 0.6 * reach if diverging else value < middle
            axes.text(column, row, text, ha="center", va="center", fontsize=8.5, color="white" if dark else "black")
