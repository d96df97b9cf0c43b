"""Results in the groupings that tables and plots ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from benchmarks.experiments.results import Results
from benchmarks.experiments.spec import Part
from benchmarks.load.records import Point, RequestRecord, RunRecord
from benchmarks.stats.request_metrics import counts, finished
from benchmarks.stats.summary import Summary, summarise
from benchmarks.topologies.spec import Topology

ALL_STREAMS = "all judged"


@dataclass(frozen=True)
class Group:
    """The runs of one topology at one point of a part: its repeats, usable ones alone."""

    part: Part
    topology: str
    point: Point
    runs: tuple[RunRecord, ...]

    @property
    def saturated(self) -> bool:
        return any(run.saturated for run in self.runs)

    @property
    def rate(self) -> float | None:
        return self.runs[0].offered_rate

    def label(self) -> str:
        rate = f"{self.rate:.3g} requests/s" if self.rate is not None else f"load {self.point.load:g}"
        return rate if self.point.prompt_tokens is None else f"prompt {self.point.prompt_tokens}, {rate}"


class Study:
    def __init__(self, results: Results) -> None:
        self.results = results
        self.manifest = results.manifest
        self.experiment = results.manifest.experiment
        self.parts = {part.name: part for part in self.experiment.parts}

    @property
    def topologies(self) -> list[Topology]:
        """Those with at least one run, in the experiment's order."""
        seen = {run.topology for run in self.results.runs}
        return [one for one in self.manifest.topologies if one.name in seen]

    @property
    def baseline(self) -> str:
        listed = dict(zip(self.experiment.listed_names, (one.name for one in self.manifest.topologies), strict=True))
        return listed[self.experiment.baseline] if self.experiment.baseline else self.manifest.topologies[0].name

    @cached_property
    def groups(self) -> list[Group]:
        """In the order of the experiment's parts, then points, then topologies."""
        found: dict[tuple[str, Point, str], list[RunRecord]] = {}
        for run in self.results.runs:
            if run.usable:
                found.setdefault((run.part, run.point, run.topology), []).append(run)
        parts = list(self.parts)
        names = [one.name for one in self.manifest.topologies]
        keys = sorted(
            found, key=lambda key: (parts.index(key[0]), key[1].prompt_tokens or 0, key[1].load, names.index(key[2]))
        )
        return [Group(self.parts[part], name, point, tuple(found[part, point, name])) for part, point, name in keys]

    def groups_of(self, part: Part, topology: str | None = None) -> list[Group]:
        return [one for one in self.groups if one.part.name == part.name and topology in (None, one.topology)]

    def points_of(self, part: Part) -> list[Point]:
        return list(dict.fromkeys(group.point for group in self.groups_of(part)))

    def at(self, part: Part, point: Point) -> list[Group]:
        return [one for one in self.groups_of(part) if one.point == point]

    def judged(self, run: RunRecord) -> list[RequestRecord]:
        """Requests of the judged streams, the warm-up's too."""
        names = {stream.name for stream in self.parts[run.part].streams if stream.judged}
        return [record for record in self.results.requests.get(run.id, []) if record.stream in names]

    def background(self, run: RunRecord) -> list[RequestRecord]:
        names = {stream.name for stream in self.parts[run.part].streams if not stream.judged}
        return [record for record in self.results.requests.get(run.id, []) if record.stream in names]

    def counted(self, group: Group) -> list[RequestRecord]:
        return [record for run in group.runs for record in counts(self.judged(run))]

    def finished(self, group: Group) -> list[RequestRecord]:
        return [record for run in group.runs for record in finished(self.judged(run))]

    def values(self, group: Group, of: Callable[[RequestRecord], float | None]) -> list[list[NDArray[np.float64]]]:
        """One value per request, by run, in the bootstrap's form."""
        return [
            [np.array([value]) for record in finished(self.judged(run)) if (value := of(record)) is not None]
            for run in group.runs
        ]

    def series(self, group: Group, of: Callable[[RequestRecord], NDArray[np.float64]]) -> list[list[NDArray[np.float64]]]:
        """Many values per request, by run."""
        return [[of(record) for record in finished(self.judged(run))] for run in group.runs]

    @cached_property
    def summaries(self) -> list[tuple[RunRecord, Summary]]:
        """Of every run and stream, the unusable ones too; and of a run's judged streams together where there are several."""
        rows = []
        for run in self.results.runs:
            part = self.parts[run.part]
            records = self.results.requests.get(run.id, [])
            for stream in part.streams:
                own = [record for record in records if record.stream == stream.name]
                slo = self.experiment.slo_of(stream) if stream.judged else None
                rows.append((run, summarise(run, stream.name, own, slo, self.experiment.stall_ms)))
        return rows

    def comparable_point(self, part: Part) -> Point | None:
        """The highest load that every topology of a part served without saturation; else the lowest there is."""
        points = self.points_of(part)
        names = {group.topology for group in self.groups_of(part)}
        for point in sorted(points, key=lambda one: (one.load, one.prompt_tokens or 0), reverse=True):
            groups = self.at(part, point)
            if {group.topology for group in groups} == names and not any(group.saturated for group in groups):
                return point
        shared = [point for point in points if {group.topology for group in self.at(part, point)} == names]
        return min(shared or points, key=lambda one: one.load, default=None)

    def steady_parts(self) -> list[Part]:
        """Parts under an open load, at one prompt distribution, without a fault: where rates and tails mean something."""
        return [
            part
            for part in self.parts.values()
            if not part.fault and not part.prompt_tokens and part.offered_rate(1.0) is not None and self.groups_of(part)
        ]


def pooled(values: Sequence[Sequence[NDArray[np.float64]]]) -> NDArray[np.float64]:
    parts = [one for run in values for one in run if len(one)]
    return np.concatenate(parts) if parts else np.zeros(0)
