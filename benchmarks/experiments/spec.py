"""An experiment as its TOML file describes it: which topologies, under which load, judged how."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from benchmarks.errors import SpecError
from benchmarks.load.records import Fault, Point
from benchmarks.topologies.spec import Derived, Server, SettingValue, Topology, load_topology, with_settings
from benchmarks.workloads.lengths import Fixed
from benchmarks.workloads.stream import Slo, Stream

FOLDER = Path(__file__).parent
START_ESTIMATE_S = 12.0
PEER_START_ESTIMATE_S = 75.0
DRAIN_ESTIMATE_S = 2.0

Seconds = Annotated[float, Meta(gt=0)]


class Search(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Search for the goodput in place of fixed loads."""

    start: Seconds
    lowest: Seconds
    highest: Seconds
    tolerance: Annotated[float, Meta(gt=1)] = 1.2
    max_probes: Annotated[int, Meta(ge=1, le=32)] = 6


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Runs of one workload: every load (or a search), times every prompt length if that varies, for every topology."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9-]+$")]
    streams: Annotated[list[Stream], Meta(min_length=1)]
    loads: list[Seconds] = []
    search: Search | None = None
    prompt_tokens: Annotated[list[int], Meta(description="vary the prompt of the judged streams")] = []
    topologies: Annotated[list[str], Meta(description="some of the experiment's; default all")] = []
    warmup_s: Annotated[float, Meta(ge=0)] = 3.0
    duration_s: Seconds = 20.0
    drain_s: Seconds = 15.0
    fault: Fault | None = None
    first_repeat_only: bool = False

    def __post_init__(self) -> None:
        if bool(self.loads) == (self.search is not None):
            raise ValueError("loads: give either loads or a search")
        if len({stream.name for stream in self.streams}) < len(self.streams):
            raise ValueError("streams: two have one name")
        if not any(stream.judged for stream in self.streams):
            raise ValueError("streams: one of them must be judged")
        if self.fault and not 0 < self.fault.after_s < self.duration_s:
            raise ValueError("fault: after_s must lie within duration_s")

    def points(self) -> list[Point]:
        return [Point(load, length) for length in self.lengths for load in self.loads]

    @property
    def lengths(self) -> list[int | None]:
        """The prompt lengths to vary; one None where none are."""
        return [*self.prompt_tokens] or [None]

    def streams_at(self, point: Point) -> list[Stream]:
        if point.prompt_tokens is None:
            return self.streams
        length = Fixed(point.prompt_tokens)
        return [msgspec.structs.replace(one, prompt=length) if one.judged else one for one in self.streams]

    def offered_rate(self, load: float) -> float | None:
        """Requests per second of the judged streams; None where the plan does not decide it."""
        rates = [stream.rate_at(load) for stream in self.streams if stream.judged]
        known = [rate for rate in rates if rate is not None]
        return sum(known) if len(known) == len(rates) else None

    @property
    def num_runs(self) -> int:
        lengths = len(self.prompt_tokens) or 1
        return lengths * (self.search.max_probes if self.search else len(self.loads))

    @property
    def planned_s(self) -> float:
        """An estimate for one topology and repeat."""
        return self.num_runs * (self.warmup_s + self.duration_s + DRAIN_ESTIMATE_S)


class TransportBench(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Run `benchmarks.bench_transport` beside the served runs: bare hand-offs, without a model."""

    arguments: list[str]
    timeout_s: Seconds = 300.0


class Experiment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"^[a-z0-9-]+$")]
    title: str
    question: str
    topologies: Annotated[list[str | Derived], Meta(min_length=1)]
    parts: Annotated[list[Part], Meta(min_length=1)]
    expected: str = ""
    model: Annotated[str, Meta(description="as `kvrelay up --model` takes it, or fake: the fake runner")] = "smollm2-135m"
    settings: Annotated[dict[str, SettingValue], Meta(description="of all our clusters")] = {}
    slo: Slo | None = None
    target: Annotated[float, Meta(gt=0, le=1, description="share of requests that must meet the SLO")] = 0.9
    stall_ms: Seconds = 200.0
    seed: Annotated[int, Meta(ge=0)] = 1
    repeats: Annotated[int, Meta(ge=1, le=50)] = 1
    max_lateness_ms: Seconds = 50.0
    warm_up_s: Annotated[float, Meta(ge=0, description="of every topology that was started, before its first run")] = 3.0
    baseline: Annotated[str, Meta(description="the topology that others are compared with; default: the first")] = ""
    transport_bench: TransportBench | None = None

    def __post_init__(self) -> None:
        names = [one if isinstance(one, str) else one.name for one in self.topologies]
        if len({part.name for part in self.parts}) < len(self.parts):
            raise ValueError("parts: two have one name")
        if len(set(names)) < len(names):
            raise ValueError("topologies: two have one name")
        if self.baseline and self.baseline not in names:
            raise ValueError(f"baseline: {self.baseline} is none of the topologies")
        for part in self.parts:
            if foreign := set(part.topologies) - set(names):
                raise ValueError(f"parts: {part.name} names {sorted(foreign)}, which are none of the topologies")
            if part.search and not self.slo and not all(one.slo for one in part.streams if one.judged):
                raise ValueError(f"parts: {part.name} searches a goodput, which needs an slo")

    def resolved_topologies(self) -> list[Topology]:
        """
        Raises:
            SpecError
        """
        found: list[Topology] = []
        for one in self.topologies:
            if isinstance(one, str):
                found.append(load_topology(one))
            else:
                found.append(with_settings(load_topology(one.base), one.settings, one.name, one.title))
        return found

    def parts_of(self, listed_name: str, repeat: int) -> list[Part]:
        """The parts that a topology, by the name that the file gives it, takes part in."""
        return [
            part
            for part in self.parts
            if listed_name in (part.topologies or [listed_name]) and not (part.first_repeat_only and repeat > 0)
        ]

    def slo_of(self, stream: Stream) -> Slo | None:
        return stream.slo or self.slo

    def entropy(self, part: Part, point: Point, repeat: int, stream: int) -> list[int]:
        """What identifies a run's randomness: the same for every topology, different for everything else."""
        return [self.seed, repeat, _number(part.name), round(point.load * 1e6), point.prompt_tokens or 0, stream]

    @property
    def listed_names(self) -> list[str]:
        return [one if isinstance(one, str) else one.name for one in self.topologies]

    @property
    def planned_s(self) -> float:
        """What a whole run is expected to take; a search may end earlier, and overloaded runs drain longer."""
        total = self.transport_bench.timeout_s / 2 if self.transport_bench else 0.0
        for repeat in range(self.repeats):
            for name, topology in zip(self.listed_names, self.resolved_topologies(), strict=True):
                parts = self.parts_of(name, repeat)
                start_s = PEER_START_ESTIMATE_S if isinstance(topology, Server) else START_ESTIMATE_S
                total += (start_s + self.warm_up_s) * bool(parts) + sum(part.planned_s for part in parts)
        return total


def load_experiment(name_or_path: str, overrides: dict[str, Any] | None = None) -> Experiment:
    """
    Args:
        name_or_path: of a ready-made one, or a TOML file.
        overrides: top-level fields to replace, such as `repeats`.

    Raises:
        SpecError: names the file and the field.
    """
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = FOLDER / f"{name_or_path}.toml"
        if not path.is_file():
            raise SpecError(
                f"there is no experiment {name_or_path!r}; there are {', '.join(ready_made())}, or give a TOML file"
            )
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")) | (overrides or {})
        experiment: Experiment = msgspec.convert(table, Experiment)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise SpecError(f"{path}: {error}") from error
    return experiment


def ready_made() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
