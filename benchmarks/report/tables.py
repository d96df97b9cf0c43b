"""The report's figures as rows: what stands in the CSV files and on the page."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.report.plot_rates import verdicts
from benchmarks.report.study import Group, Study, pooled
from benchmarks.stats.bootstrap import MIN_REQUESTS, Interval, Repeats, compare, interval, mean_interval, wilson
from benchmarks.stats.request_metrics import e2e_s, gaps_s, tbt_s, tpot_s, ttft_s
from benchmarks.stats.summary import Quantiles, Summary, quantiles, tokens_in_window

RESAMPLES = 300


@dataclass(frozen=True)
class Row:
    """One topology at one point, over its usable repeats. Latencies in milliseconds."""

    part: str
    point: str
    topology: str
    repeats: int
    requests: int
    failed: int
    attainment: Interval | None
    attainment_ttft: float | None
    attainment_tpot: float | None
    ttft: Quantiles | None
    ttft_p90: Interval | None
    tpot: Quantiles | None
    itl: Quantiles | None
    itl_p99: Interval | None
    tbt_p90: float | None
    e2e: Quantiles | None
    stalls_per_request: float | None
    requests_per_s: float
    tokens_per_s: float
    saturated: bool


@dataclass(frozen=True)
class ComparisonRow:
    """`ratio` is topology over baseline; below 1 the topology is faster."""

    part: str
    point: str
    topology: str
    baseline: str
    metric: str
    ratio: float
    low: float
    high: float
    p_value: float
    repeats: int
    differs: bool
    saturated: bool
    failed: int  # requests of the two that have no latency
    num_requests: int  # that have one, of the one that has fewer

    def sentence(self) -> str:
        direction = "lower" if self.ratio < 1 else "higher"
        of = f"{self.ratio:.2f} of" if self.ratio < 1 else f"{self.ratio:.2f} times"
        notes = ["one of the two was past saturation"] * self.saturated
        notes += [f"{self.failed} requests failed and are in no latency"] * bool(self.failed)
        notes += [f"only {self.num_requests} requests"] * (self.num_requests < MIN_REQUESTS)
        note = f"; {', '.join(notes)}" if notes else ""
        return (
            f"{self.part}, {self.point}: {self.metric} of {self.topology} is {direction}, {of} that of {self.baseline} "
            f"(95 % interval {self.low:.2f} to {self.high:.2f}{note})"
        )


@dataclass(frozen=True)
class GoodputSummary:
    part: str
    topology: str
    prompt_tokens: int | None
    goodput: Interval  # requests per second
    brackets: str
    per_core: float


def rows_of(study: Study) -> list[Row]:
    return [_row(study, group) for group in study.groups]


def _row(study: Study, group: Group) -> Row:
    seed = study.experiment.seed
    counted, good = study.counted(group), study.finished(group)
    marks = verdicts(study, group)
    gaps = study.series(group, gaps_s)
    first = study.values(group, ttft_s)
    stalls = int((pooled(gaps) * 1e3 > study.experiment.stall_ms).sum())
    window = sum(run.duration_s for run in group.runs)
    tbts = [value for record in good if (value := tbt_s(record)) is not None]
    tokens = sum(
        tokens_in_window(study.results.requests.get(run.id, []), run.warmup_s, run.duration_s) for run in group.runs
    )
    return Row(
        part=group.part.name,
        point=group.label(),
        topology=group.topology,
        repeats=len(group.runs),
        requests=len(counted),
        failed=len(counted) - len(good),
        attainment=wilson(sum(one.both for one in marks), len(marks)),
        attainment_ttft=float(np.mean([one.ttft for one in marks])) if marks else None,
        attainment_tpot=float(np.mean([one.tpot for one in marks])) if marks else None,
        ttft=quantiles(pooled(first)),
        ttft_p90=_in_ms(interval(first, 90, seed, RESAMPLES)),
        tpot=quantiles(pooled(study.values(group, tpot_s))),
        itl=quantiles(pooled(gaps)),
        itl_p99=_in_ms(interval(gaps, 99, seed, RESAMPLES)),
        tbt_p90=float(np.percentile(tbts, 90)) * 1e3 if tbts else None,
        e2e=quantiles(pooled(study.values(group, e2e_s))),
        stalls_per_request=stalls / len(good) if good else None,
        requests_per_s=len(good) / window,
        tokens_per_s=tokens / window,
        saturated=group.saturated,
    )


def comparisons_of(study: Study) -> list[ComparisonRow]:
    """Every topology against the baseline, point by point: the same requests at the same moments."""
    rows = []
    for group in study.groups:
        base = next((one for one in study.at(group.part, group.point) if one.topology == study.baseline), None)
        if base is None or group.topology == study.baseline or group.part.fault or group.part.search:
            continue
        rows += compare_groups(study, group, study, base)
    return rows


def compare_groups(
    study_a: Study, a: Group, study_b: Study, b: Group, label_a: str = "", label_b: str = ""
) -> list[ComparisonRow]:
    pairs: tuple[tuple[str, Repeats, Repeats, float], ...] = (
        ("p99 ITL", study_a.series(a, gaps_s), study_b.series(b, gaps_s), 99),
        ("median TPOT", study_a.values(a, tpot_s), study_b.values(b, tpot_s), 50),
        ("p90 TTFT", study_a.values(a, ttft_s), study_b.values(b, ttft_s), 90),
        ("p90 E2E", study_a.values(a, e2e_s), study_b.values(b, e2e_s), 90),
    )
    failed = sum(len(study.counted(group)) - len(study.finished(group)) for study, group in ((study_a, a), (study_b, b)))
    rows = []
    for metric, ours, theirs, percent in pairs:
        found = compare(ours, theirs, percent, study_a.experiment.seed, RESAMPLES)
        if found is None:
            continue
        rows.append(
            ComparisonRow(
                part=a.part.name,
                point=a.label(),
                topology=label_a or a.topology,
                baseline=label_b or b.topology,
                metric=metric,
                ratio=found.ratio.estimate,
                low=found.ratio.low,
                high=found.ratio.high,
                p_value=found.p_value,
                repeats=min(len(a.runs), len(b.runs)),
                differs=found.differs,
                saturated=a.saturated or b.saturated,
                failed=failed,
                num_requests=found.num_requests,
            )
        )
    return rows


def goodputs_of(study: Study) -> list[GoodputSummary]:
    cores = {one.name: one.num_cores for one in study.manifest.topologies}
    found: dict[tuple[str, str, int | None], list[Any]] = {}
    for row in study.manifest.goodputs:
        found.setdefault((row.part, row.topology, row.prompt_tokens), []).append(row)
    summaries = []
    for (part, topology, length), rows in found.items():
        mean = mean_interval([row.met or 0.0 for row in rows])
        assert mean is not None
        brackets = "; ".join(_bracket(row.met, row.missed) for row in rows)
        summaries.append(GoodputSummary(part, topology, length, mean, brackets, mean.estimate / cores[topology]))
    return summaries


def _bracket(met: float | None, missed: float | None) -> str:
    if met is None:
        return f"below {missed:.3g}" if missed is not None else "not found"
    return f"{met:.3g} to {missed:.3g}" if missed is not None else f"at least {met:.3g}"


def write_csvs(study: Study, comparisons: Sequence[ComparisonRow], directory: Path) -> None:
    rows = []
    for run, summary in study.summaries:
        head = {
            "run": run.id,
            "part": run.part,
            "topology": run.topology,
            "load": run.point.load,
            "prompt_tokens_axis": run.point.prompt_tokens,
            "repeat": run.repeat,
            "offered_rate": run.offered_rate,
            "invalid": run.invalid,
            "failed": run.failed,
            "saturated": run.saturated,
            "searched": run.searched,
            "lateness_p99_ms": run.lateness_p99_ms,
            "client_cpu": run.client_cpu,
        }
        rows.append(head | _flat(summary))
    _write(directory / "summary.csv", rows)
    _write(directory / "comparisons.csv", [asdict(one) for one in comparisons])
    _write(directory / "goodput.csv", [msgspec.to_builtins(one) for one in study.manifest.goodputs])


def _flat(summary: Summary) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in msgspec.structs.asdict(summary).items():
        if isinstance(value, Quantiles):
            flat |= {
                f"{name}_{key}_ms" if key != "n" else f"{name}_n": one for key, one in msgspec.structs.asdict(value).items()
            }
        elif name != "run" and value is not None:
            flat[name] = value
    return flat


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Columns in the order in which they first appear. No rows, no file."""
    if not rows:
        path.unlink(missing_ok=True)
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _columns(rows))
        writer.writeheader()
        writer.writerows(rows)


def _columns(rows: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _in_ms(found: Interval | None) -> Interval | None:
    return None if found is None else Interval(found.estimate * 1e3, found.low * 1e3, found.high * 1e3)
