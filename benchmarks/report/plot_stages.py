"""Plots of the server's own timeline: where the first and the second token's time goes, and what a transfer costs.

The timeline's fields are explained in docs/api.md. A stage that did not happen counts as 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from benchmarks.load.records import RequestRecord
from benchmarks.report.figure import PALETTE, Colours, Plot, grid, plain_log
from benchmarks.report.study import Study
from benchmarks.stats.request_metrics import finished, gaps_s, ttft_s

FIRST_STAGES = ("route", "reserve", "prefill_queue", "prefill", "decode_queue", "first_step", "rest")
SECOND_STAGES = ("transfer left", "decode_queue", "first_step", "rest")
MAX_TOPOLOGIES = 4
MIN_REQUESTS = 2


@dataclass(frozen=True)
class Bin:
    label: str
    records: list[RequestRecord]


def first_token_stages(record: RequestRecord) -> dict[str, float]:
    """Milliseconds of TTFT by stage. On a split route D's stages come after the first token and are no part of it."""
    times = record.timeline or {}
    split = times.get("prefill_ms") is not None
    names = FIRST_STAGES[:4] if split else ("route", "decode_queue", "first_step")
    stages = {name: float(times.get(f"{name}_ms") or 0.0) for name in names}
    first = ttft_s(record)
    assert first is not None
    return stages | {"rest": max(0.0, first * 1e3 - sum(stages.values()))}


def second_token_stages(record: RequestRecord) -> dict[str, float]:
    """Milliseconds between the first and the second token. `transfer left` is what of the transfer outlasted prefill: all of
    the gap that D's queue and step do not account for, on a split route."""
    gap_ms = float(gaps_s(record)[0]) * 1e3
    times = record.timeline or {}
    if times.get("transfer_ms") is None:
        return {"rest": gap_ms}
    queue, step = float(times.get("decode_queue_ms") or 0.0), float(times.get("first_step_ms") or 0.0)
    left = min(float(times["transfer_ms"]), max(0.0, gap_ms - queue - step))
    stages = {"transfer left": left, "decode_queue": queue, "first_step": step}
    return stages | {"rest": max(0.0, gap_ms - sum(stages.values()))}


def breakdown(study: Study, colours: Colours) -> Plot:
    plot = Plot(
        "4-breakdown",
        "Where TTFT and the second token go, by prompt length",
        "Means over requests, stacked. Split: P computes the prompt (prefill) and the second token waits for the end of the "
        "transfer, D's queue and its step. Colocated: first_step is the prompt's computation. Rest: HTTP, tokenising, "
        "messages, and whatever the server does not see.",
    )
    chosen = [
        (topology.name, bins)
        for topology in study.topologies
        if (bins := _bins([one for one in _records(study, topology.name) if one.timeline and len(one.token_s) > 1]))
    ][:MAX_TOPOLOGIES]
    if not chosen:
        return Plot(plot.key, plot.title, plot.reading, None, "no server of this experiment reports a timeline")
    figure, rows = grid(2, len(chosen), 3.0)
    for column, (name, bins) in enumerate(chosen):
        _stack(rows[0][column], bins, first_token_stages, FIRST_STAGES)
        _stack(rows[1][column], bins, second_token_stages, SECOND_STAGES)
        rows[0][column].set_title(f"{name}: TTFT")
        rows[1][column].set(title=f"{name}: second token", xlabel="prompt tokens")
    for row in rows:
        row[0].set_ylabel("ms")
        top = max(axes.get_ylim()[1] for axes in row)
        for axes in row:
            axes.set_ylim(0, top)
    handles = {
        label: handle
        for row in rows
        for axes in row
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=8)
    return Plot(plot.key, plot.title, plot.reading, figure)


def _records(study: Study, topology: str) -> list[RequestRecord]:
    """Of the parts that vary the prompt length if there are such, else of all without a fault; all streams, unsaturated."""
    groups = [group for group in study.groups if group.topology == topology and not group.part.fault and not group.saturated]
    varied = [group for group in groups if group.part.prompt_tokens]
    runs = [run for group in varied or groups for run in group.runs]
    return [record for run in runs for record in finished(study.results.requests.get(run.id, []))]


def _bins(records: list[RequestRecord]) -> list[Bin]:
    """By exact length where there are few, else by powers of two."""
    lengths = sorted({_length(record) for record in records})
    if len(lengths) <= 8:
        bins = [Bin(str(length), [one for one in records if _length(one) == length]) for length in lengths]
    else:
        powers = sorted({_power(length) for length in lengths})
        bins = [Bin(f"≤{power}", [one for one in records if _power(_length(one)) == power]) for power in powers]
    return [one for one in bins if len(one.records) >= MIN_REQUESTS]


def _length(record: RequestRecord) -> int:
    return record.planned_prompt_tokens


def _power(length: int) -> int:
    return 1 << max(0, length - 1).bit_length()


def _stack(axes: Axes, bins: list[Bin], stages: Callable[[RequestRecord], dict[str, float]], names: tuple[str, ...]) -> None:
    found = [[stages(record) for record in one.records] for one in bins]
    bottom = np.zeros(len(bins))
    for name in names:
        heights = np.array([np.mean([one.get(name, 0.0) for one in rows]) for rows in found])
        if heights.any():
            index = (*FIRST_STAGES, "transfer left").index(name)
            axes.bar(range(len(bins)), heights, bottom=bottom, color=PALETTE[index % len(PALETTE)], label=name, width=0.7)
        bottom += heights
    axes.set_xticks(range(len(bins)), [one.label for one in bins], rotation=30 if len(bins) > 5 else 0)


def transfers(study: Study, colours: Colours) -> Plot:
    plot = Plot(
        "5-transfers",
        "Transfer time and rate against KV bytes",
        "Served: medians by size of the timeline's transfer_ms, which runs from opening the hand-off to the last verified "
        "block and overlaps with prefill, so it is an upper bound. Bare: bench_transport's hand-offs without a model, with "
        "checksums.",
    )
    figure, rows = grid(1, 2, 3.6)
    time_axes, rate_axes = rows[0]
    drawn = _served_transfers(study, colours, time_axes, rate_axes) | _bare_transfers(study, time_axes, rate_axes)
    if not drawn:
        return Plot(plot.key, plot.title, plot.reading, None, "nothing was handed off, or the server does not report it")
    for axes in rows[0]:
        axes.set(xscale="log", yscale="log", xlabel="KV bytes of a hand-off")
        plain_log(axes.yaxis)
        plain_log(axes.xaxis)
        axes.xaxis.set_major_formatter(EngFormatter("B", sep=" "))
    time_axes.set(title="time", ylabel="ms")
    rate_axes.set(title="rate", ylabel="GB/s")
    handles, labels = time_axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return Plot(plot.key, plot.title, plot.reading, figure)


def _served_transfers(study: Study, colours: Colours, time_axes: Axes, rate_axes: Axes) -> bool:
    per_token = study.manifest.kv_bytes_per_token
    drawn = False
    for topology in study.topologies if per_token else []:
        assert per_token is not None
        by_size: dict[int, list[float]] = {}
        for record in _records(study, topology.name):
            transfer_ms = (record.timeline or {}).get("transfer_ms")
            moved = (record.prompt_tokens or record.planned_prompt_tokens) - (record.cached_tokens or 0)
            if transfer_ms and moved > 0:
                by_size.setdefault(_power(moved), []).append(transfer_ms)
        sizes = sorted(size for size, times in by_size.items() if len(times) >= MIN_REQUESTS)
        if sizes:
            drawn = True
            nbytes = np.array(sizes, dtype=np.float64) * per_token
            ms = np.array([np.median(by_size[size]) for size in sizes])
            look: dict[str, Any] = {
                "color": colours.colour(topology.name),
                "marker": colours.marker(topology.name),
                "markersize": 5,
            }
            time_axes.plot(nbytes, ms, label=f"{topology.name} (served)", **look)
            rate_axes.plot(nbytes, nbytes / ms / 1e6, **look)
    return drawn


def _bare_transfers(study: Study, time_axes: Axes, rate_axes: Axes) -> bool:
    rows = [row for row in study.results.transport if row["bench"] in ("handoff", "prompt") and row["concurrency"] == 1]
    names = list(dict.fromkeys(row["transport"] for row in rows))
    for index, name in enumerate(names):
        own = sorted((row["bytes"], row["ms"], row["gb_per_s"]) for row in rows if row["transport"] == name)
        look: dict[str, Any] = {"color": PALETTE[index % len(PALETTE)], "linestyle": "--", "linewidth": 1.2}
        time_axes.plot([one[0] for one in own], [one[1] for one in own], label=f"{name} (bare)", **look)
        rate_axes.plot([one[0] for one in own], [one[2] for one in own], **look)
    return bool(rows)
