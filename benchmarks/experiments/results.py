"""What a finished (or interrupted) experiment leaves in its folder.

manifest.json     the experiment as it was run, its topologies, the machine, versions, commit, commands, what was skipped
runs.jsonl        one RunRecord a line
requests.jsonl    one RequestRecord a line
transport.json    rows of bench_transport, where the experiment asks for them
logs/             what the servers wrote
summary.csv, goodput.csv, comparisons.csv, plots/, report.html      made from the above, and made again by `bench report`
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.errors import SpecError
from benchmarks.experiments.spec import Experiment
from benchmarks.load.records import RequestRecord, RunRecord, append_records, read_requests, read_runs
from benchmarks.topologies.spec import Topology

MANIFEST, RUNS, REQUESTS, TRANSPORT = "manifest.json", "runs.jsonl", "requests.jsonl", "transport.json"


class Machine(msgspec.Struct, frozen=True):
    cpu: str
    cpus: str  # that the experiment may use
    num_cpus: int  # of the whole machine
    memory_gib: float
    kernel: str
    load_average: float  # when it began: what else the machine was doing


class GoodputRow(msgspec.Struct, frozen=True):
    """One search's answer, in requests per second of the judged streams."""

    part: str
    topology: str
    repeat: int
    prompt_tokens: int | None
    met: float | None
    missed: float | None


class Manifest(msgspec.Struct, kw_only=True):
    experiment: Experiment
    topologies: list[Topology]
    machine: Machine
    versions: dict[str, str]
    commit: str
    command: str  # that made this
    started: str
    took_s: float = 0.0
    complete: bool = False
    commands: dict[str, str] = {}  # by topology
    skipped: dict[str, str] = {}  # topologies that could not run here, and why
    goodputs: list[GoodputRow] = []
    kv_bytes_per_token: int | None = None

    def topology(self, name: str) -> Topology | None:
        return next((one for one in self.topologies if one.name == name), None)


class ResultFolder:
    """Writes as the experiment goes on, so that an interrupted one can be reported."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    @property
    def plots(self) -> Path:
        return self.directory / "plots"

    def create(self) -> None:
        """
        Raises:
            SpecError: the folder holds results already, or cannot be made.
        """
        if (self.directory / MANIFEST).exists():
            raise SpecError(f"out: {self.directory} holds the results of another run; give a new folder")
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecError(f"out: {self.directory} cannot be made: {error.strerror}") from error

    def write_manifest(self, manifest: Manifest) -> None:
        temporary = self.directory / f"{MANIFEST}.new"
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
        temporary.rename(self.directory / MANIFEST)

    def add_run(self, run: RunRecord, requests: Iterable[RequestRecord]) -> None:
        append_records(self.directory / REQUESTS, requests)
        append_records(self.directory / RUNS, [run])


class Results(msgspec.Struct):
    """All that a report is made from."""

    manifest: Manifest
    runs: list[RunRecord]
    requests: dict[str, list[RequestRecord]]  # by run
    transport: list[dict[str, Any]]


def read_results(directory: Path) -> Results:
    """
    Raises:
        SpecError: the folder holds no results, or those of another version.
    """
    try:
        manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
        runs = read_runs(directory / RUNS) if (directory / RUNS).is_file() else []
        requests: dict[str, list[RequestRecord]] = {run.id: [] for run in runs}
        if (directory / REQUESTS).is_file():
            for record in read_requests(directory / REQUESTS):
                requests.setdefault(record.run, []).append(record)
        path = directory / TRANSPORT
        transport = msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]]) if path.is_file() else []
    except (OSError, msgspec.DecodeError) as error:
        raise SpecError(f"{directory} holds no results that can be read: {error}") from error
    return Results(manifest, runs, requests, transport)
