"""Plots of latencies: their distributions, and how they go over time around long prompts and around a kill."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from benchmarks.load.records import RequestRecord, RunRecord
from benchmarks.report.figure import INVALID, Colours, Plot, grid, legend_below, plain_log
from benchmarks.report.study import Group, Study, pooled
from benchmarks.stats.request_metrics import gaps_s, ttft_s

MAX_PARTS = 3
MAX_DOTS = 4000
MIN_MS = 1.0
"""Pieces that came in one read of the socket have no gap between them; they are drawn here."""
SHARES = (0.5, 0.9, 0.99, 0.999)


def distributions(study: Study, colours: Colours) -> Plot:
    plot = Plot(
        "2-distributions",
        "Distributions of TTFT and ITL",
        "At the highest load that every topology served without saturation (else the lowest). The vertical axis is "
        "stretched towards 1, so that the tail can be read: at 0.99 stands the p99.",
    )
    without_fault = [part for part in study.parts.values() if not part.fault and study.groups_of(part)]
    parts = ([part for part in without_fault if not part.prompt_tokens] or without_fault)[:MAX_PARTS]
    if not parts:
        return Plot(plot.key, plot.title, plot.reading, None, "there is no usable run")
    figure, rows = grid(len(parts), 2, 3.3)
    for part, row in zip(parts, rows, strict=True):
        point = study.comparable_point(part)
        groups = study.at(part, point) if point else []
        for group in groups:
            first = pooled(study.values(group, ttft_s))
            gaps = pooled(study.series(group, gaps_s))
            for axes, values in zip(row, (first, gaps), strict=True):
                distribution(axes, values * 1e3, colours.colour(group.topology), group.topology)
        where = groups[0].label() if groups else ""
        row[0].set(title=f"{part.name}: TTFT at {where}", xlabel="ms", ylabel="share at or below")
        row[1].set(title=f"{part.name}: ITL at {where}", xlabel="ms")
    legend_below(figure, rows[0][0])
    return Plot(plot.key, plot.title, plot.reading, figure)


def distribution(axes: Axes, values: NDArray[np.float64], colour: str, name: str) -> None:
    if not len(values):
        return
    ordered = np.sort(np.maximum(values, MIN_MS))
    shares = np.arange(1, len(ordered) + 1) / (len(ordered) + 1)  # below 1, so that the last one can be drawn
    kept = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), MAX_DOTS)).astype(int))
    axes.step(ordered[kept], shares[kept], where="post", color=colour, linewidth=1.4, label=name)
    axes.set_xscale("log")
    plain_log(axes.xaxis)
    axes.set_yscale("logit", nonpositive="clip")
    axes.set_yticks(SHARES, [f"{share:g}" for share in SHARES])
    axes.set_yticks([], minor=True)
    axes.set_ylim(0.05, 0.9995)


def over_time(study: Study, colours: Colours) -> Plot:
    plot = Plot(
        "3-itl-over-time",
        "ITL over time while long prompts arrive",
        "Each dot is a gap between two tokens of a judged request. Shaded: from the arrival of a long prompt to its first "
        "token. First repeat, at the load of the distributions above.",
    )
    for part in study.parts.values():
        point = study.comparable_point(part)
        if part.fault or point is None or all(stream.judged for stream in part.streams):
            continue
        groups = study.at(part, point)
        figure, rows = grid(len(groups), 1, 2.0, share_y=True, share_x=True)
        for group, (axes,) in zip(groups, rows, strict=True):
            _gaps_over_time(axes, study, group.runs[0], colours.colour(group.topology))
            axes.set(title=f"{group.topology} at {group.label()}", ylabel="ITL, ms", yscale="log")
            plain_log(axes.yaxis)
        rows[-1][0].set_xlabel("seconds since the start of the run")
        return Plot(plot.key, plot.title, plot.reading, figure)
    return Plot(plot.key, plot.title, plot.reading, None, "no part has long prompts beside the judged requests")


def _gaps_over_time(axes: Axes, study: Study, run: RunRecord, colour: str) -> None:
    times: list[float] = []
    gaps: list[float] = []
    for record in study.judged(run):
        times += record.token_s[1:]
        gaps += [float(gap) * 1e3 for gap in gaps_s(record)]
    axes.plot(
        times, np.maximum(gaps, MIN_MS), ".", color=colour, markersize=2.5, alpha=0.6, rasterized=len(times) > MAX_DOTS
    )
    for record in study.background(run):
        if record.token_s:
            axes.axvspan(record.scheduled_s, record.token_s[0], color="black", alpha=0.08, linewidth=0)
    axes.set_xlim(0, run.warmup_s + run.duration_s)


def around_a_kill(study: Study, colours: Colours) -> Plot:
    plot = Plot(
        "9-kill",
        "Around a kill: success and TTFT",
        "Requests by the second of their arrival, before and after a worker's process was killed (SIGKILL) at 0. Above: "
        "share that ended well. Below: TTFT of those that did; crosses are requests that failed.",
    )
    groups = [group for group in study.groups if group.part.fault and any(run.fault_s is not None for run in group.runs)]
    if not groups:
        return Plot(plot.key, plot.title, plot.reading, None, "no run of this experiment kills a worker")
    figure, (above, below) = _kill_axes()
    highest = 1.0
    for index, group in enumerate(groups):
        relative = _around(study, group)
        highest = max([highest, *(first * 1e3 for _, one in relative if (first := ttft_s(one)) is not None)])
        _success(above, relative, colours, group.topology)
        good = [(at, first * 1e3) for at, one in relative if one.status == "ok" and (first := ttft_s(one)) is not None]
        colour = colours.colour(group.topology)
        below.plot(
            [at for at, _ in good], [ms for _, ms in good], colours.marker(group.topology), color=colour, markersize=4
        )
        bad = [at for at, one in relative if one.status in ("error", "unfinished")]
        below.plot(
            bad, [0.4 + 0.18 * index] * len(bad), "x", color=colour, markersize=7, transform=below.get_xaxis_transform()
        )
    fault = groups[0].part.fault
    assert fault is not None
    for axes in (above, below):
        axes.axvline(0, color=INVALID, linewidth=1)
    above.set(title=f"{fault.target} is killed at 0", ylabel="success", ylim=(-0.05, 1.05))
    below.set(xlabel="seconds from the kill", ylabel="TTFT, ms", yscale="log", ylim=(1, highest * 2))
    plain_log(below.yaxis)
    legend_below(figure, above)
    return Plot(plot.key, plot.title, plot.reading, figure)


def _kill_axes() -> tuple[Figure, tuple[Axes, Axes]]:
    figure, rows = grid(2, 1, 2.5, share_x=True)
    return figure, (rows[0][0], rows[1][0])


def _around(study: Study, group: Group) -> list[tuple[float, RequestRecord]]:
    return [
        (record.scheduled_s - run.fault_s, record)
        for run in group.runs
        if run.fault_s is not None
        for record in study.judged(run)
        if record.status != "cancelled"
    ]


def _success(axes: Axes, relative: list[tuple[float, RequestRecord]], colours: Colours, name: str) -> None:
    seconds: dict[int, list[bool]] = {}
    for at, record in relative:
        seconds.setdefault(int(np.floor(at)), []).append(record.status == "ok")
    moments = sorted(seconds)
    shares = [sum(seconds[one]) / len(seconds[one]) for one in moments]
    axes.plot(
        [one + 0.5 for one in moments],
        shares,
        marker=colours.marker(name),
        color=colours.colour(name),
        markersize=4,
        label=name,
    )
