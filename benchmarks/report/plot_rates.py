"""Plots over the request rate: attainment, and what a user gets against what a core gives."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes

from benchmarks.experiments.spec import Part
from benchmarks.report.figure import INVALID, Colours, Plot, grid, legend_below
from benchmarks.report.study import Group, Study
from benchmarks.stats.bootstrap import wilson
from benchmarks.stats.request_metrics import Verdict, judge, tpot_s
from benchmarks.stats.summary import tokens_in_window

MAX_PARTS = 4


def attainment(study: Study, colours: Colours) -> Plot:
    plot = Plot(
        "1-attainment",
        "SLO attainment against request rate",
        "Share of judged requests that met the TTFT target, the TPOT target, and both. The horizontal line is the share "
        "that goodput asks for. Bars: Wilson's 95 % interval. Hollow: past saturation. Crosses at the bottom: invalid or "
        "failed runs.",
    )
    parts = [part for part in study.steady_parts() if _has_slo(study, part)][:MAX_PARTS]
    if not parts:
        return _absent(plot, "no part has an open load and an SLO")
    figure, rows = grid(len(parts), 3, 3.0, share_y=True)
    marks: tuple[tuple[str, Callable[[Verdict], bool]], ...] = (
        ("both", lambda one: one.both),
        ("TTFT alone", lambda one: one.ttft),
        ("TPOT alone", lambda one: one.tpot),
    )
    for part, row in zip(parts, rows, strict=True):
        for axes, (name, mark) in zip(row, marks, strict=True):
            for topology in study.topologies:
                _attainment_line(axes, study, study.groups_of(part, topology.name), topology.name, colours, mark)
            _invalid_marks(axes, study, part)
            axes.axhline(study.experiment.target, color="black", linewidth=0.8, linestyle=":")
            axes.set(title=f"{part.name}: {name}", xlabel="requests/s offered", ylim=(-0.04, 1.04))
        row[0].set_ylabel("attainment")
    legend_below(figure, rows[0][0])
    return Plot(plot.key, plot.title, plot.reading, figure)


def _attainment_line(
    axes: Axes, study: Study, groups: list[Group], name: str, colours: Colours, mark: Callable[[Verdict], bool]
) -> None:
    points = []
    for group in sorted(groups, key=lambda one: one.rate or 0.0):
        marks = [mark(one) for one in verdicts(study, group)]
        found = wilson(sum(marks), len(marks))
        if found and group.rate is not None:
            points.append((group.rate, found, group.saturated))
    if not points:
        return
    rates = [rate for rate, _, _ in points]
    centres = [found.estimate for _, found, _ in points]
    errors = [
        [found.estimate - found.low for _, found, _ in points],
        [found.high - found.estimate for _, found, _ in points],
    ]
    colour = colours.colour(name)
    axes.errorbar(rates, centres, yerr=np.abs(errors), color=colour, linewidth=1.4, capsize=2, elinewidth=0.8, label=name)
    for rate, found, saturated in points:
        face = "white" if saturated else colour
        axes.plot([rate], [found.estimate], colours.marker(name), color=colour, markerfacecolor=face, markersize=5)


def _invalid_marks(axes: Axes, study: Study, part: Part) -> None:
    for run in study.results.runs:
        if run.part == part.name and not run.usable and run.offered_rate is not None:
            axes.plot([run.offered_rate], [0.0], "x", color=INVALID, markersize=7)


def verdicts(study: Study, group: Group) -> list[Verdict]:
    slos = {stream.name: study.experiment.slo_of(stream) for stream in group.part.streams if stream.judged}
    return [judge(one, slo) for one in study.counted(group) if (slo := slos.get(one.stream)) is not None]


def per_core(study: Study, colours: Colours) -> Plot:
    plot = Plot(
        "7-per-user-per-core",
        "Tokens per second: one user's against one core's",
        "Each point is a load: what a user sees (1 / median TPOT) against what a core yields (output tokens per second over "
        "all streams, over the cores of the workers). Up and to the right is better. Hollow: past saturation.",
    )
    parts = [part for part in study.parts.values() if not part.fault and not part.prompt_tokens and study.groups_of(part)]
    if not parts:
        return _absent(plot, "no part varies the load alone")
    parts = parts[:3]
    figure, rows = grid(1, len(parts), 3.6)
    for part, axes in zip(parts, rows[0], strict=True):
        for topology in study.topologies:
            groups = sorted(study.groups_of(part, topology.name), key=lambda one: one.point.load)
            points = [found for group in groups if (found := _user_and_core(study, group, topology.num_cores)) is not None]
            if not points:
                continue
            colour = colours.colour(topology.name)
            axes.plot(
                [one[0] for one in points], [one[1] for one in points], color=colour, linewidth=1.2, label=topology.name
            )
            for user, core, saturated in points:
                face = "white" if saturated else colour
                axes.plot([user], [core], colours.marker(topology.name), color=colour, markerfacecolor=face, markersize=6)
        axes.margins(0.12)
        axes.set(title=part.name, xlabel="tokens/s per user", xlim=(0, None), ylim=(0, None))
    rows[0][0].set_ylabel("output tokens/s per core")
    legend_below(figure, rows[0][0])
    return Plot(plot.key, plot.title, plot.reading, figure)


def _user_and_core(study: Study, group: Group, cores: int) -> tuple[float, float, bool] | None:
    tpots = [value for record in study.finished(group) if (value := tpot_s(record)) is not None]
    if not tpots or not (median := float(np.median(tpots))):
        return None
    rates = [
        tokens_in_window(study.results.requests.get(run.id, []), run.warmup_s, run.duration_s) / run.duration_s
        for run in group.runs
    ]
    return 1 / median, float(np.mean(rates)) / cores, group.saturated


def _has_slo(study: Study, part: Part) -> bool:
    return any(study.experiment.slo_of(stream) for stream in part.streams if stream.judged)


def _absent(plot: Plot, why: str) -> Plot:
    return Plot(plot.key, plot.title, plot.reading, None, why)
