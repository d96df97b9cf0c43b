"""Runs an experiment: repeats outside, topologies inside in turning order, so that a drifting machine treats all alike."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.errors import TopologyFailed, TopologySkipped
from benchmarks.experiments.one_run import RunMaker, settle
from benchmarks.experiments.results import TRANSPORT, GoodputRow, Manifest, ResultFolder
from benchmarks.experiments.spec import Experiment, Part
from benchmarks.load.records import Point, RequestRecord, RunRecord
from benchmarks.stats.goodput import GoodputSearch
from benchmarks.stats.request_metrics import counts, judge
from benchmarks.stats.summary import share
from benchmarks.topologies.running import Place, Started, started
from benchmarks.topologies.spec import Topology

SETTLE_S = 60.0


class Conductor:
    """
    Args:
        place: what topologies are started with; its settings are the experiment's.
    """

    def __init__(
        self,
        experiment: Experiment,
        manifest: Manifest,
        folder: ResultFolder,
        place: Place,
        runs: RunMaker,
        console: Console,
    ) -> None:
        self._experiment = experiment
        self._manifest = manifest
        self._folder = folder
        self._place = place
        self._runs = runs
        self._console = console
        self._names = dict(zip((one.name for one in manifest.topologies), experiment.listed_names, strict=True))

    async def run(self) -> None:
        """All of it. What fails is written down, and the rest goes on.

        Raises:
            SpecError: a trace cannot be read.
        """
        begin = time.monotonic()
        try:
            if self._experiment.transport_bench:
                await self._bench_transports()
            for repeat in range(self._experiment.repeats):
                topologies = self._manifest.topologies
                turn = repeat % len(topologies)
                for topology in topologies[turn:] + topologies[:turn]:
                    await self._topology(topology, repeat)
            self._manifest.complete = True
        finally:
            self._manifest.took_s = round(time.monotonic() - begin, 1)
            self._folder.write_manifest(self._manifest)

    async def _topology(self, topology: Topology, repeat: int) -> None:
        parts = self._experiment.parts_of(self._names[topology.name], repeat)
        if not parts or topology.name in self._manifest.skipped:
            return
        self._say(f"starting {topology.name} ({topology.title})")
        done = 0
        try:
            async with started(topology, self._place, f"{topology.name}-{repeat + 1}") as server:
                self._manifest.commands.setdefault(topology.name, " ".join(server.command))
                await self._runs.warm_up(server)
                for part in parts:
                    await self._part(server, part, repeat)
                    done += 1
        except TopologySkipped as error:
            self._say(f"skipped {topology.name}: {error}")
            self._manifest.skipped[topology.name] = str(error)
        except TopologyFailed as error:
            self._say(f"FAILED {topology.name}: {error}")
            for part in parts[done:]:
                record = self._runs.new_record(part, topology.name, _first_point(part), repeat)
                record.failed = str(error)
                self._folder.add_run(record, [])
        self._folder.write_manifest(self._manifest)

    async def _part(self, server: Started, part: Part, repeat: int) -> None:
        if part.search is None:
            for point in part.points():
                await self._measure(server, part, point, repeat)
            return
        for length in part.lengths:
            await self._search(server, part, length, repeat)

    async def _search(self, server: Started, part: Part, prompt_tokens: int | None, repeat: int) -> None:
        assert part.search is not None
        wanted = part.search
        search = GoodputSearch(
            wanted.start, wanted.lowest, wanted.highest, self._experiment.target, wanted.tolerance, wanted.max_probes
        )
        while (load := search.next_load()) is not None:
            run, requests = await self._measure(server, part, Point(round(load, 6), prompt_tokens), repeat)
            search.report(load, self._attainment(part, requests) if run.usable else None, saturated=run.saturated)
        found = search.result()
        scale = part.offered_rate(1.0) or 1.0
        row = GoodputRow(
            part=part.name,
            topology=server.topology.name,
            repeat=repeat,
            prompt_tokens=prompt_tokens,
            met=None if found.met is None else found.met * scale,
            missed=None if found.missed is None else found.missed * scale,
        )
        self._manifest.goodputs.append(row)
        self._folder.write_manifest(self._manifest)

    async def _measure(
        self, server: Started, part: Part, point: Point, repeat: int
    ) -> tuple[RunRecord, list[RequestRecord]]:
        """
        Raises:
            TopologyFailed: the topology did not come back to rest, so that nothing more can be measured on it.
        """
        run, requests = await self._runs.run(server, part, point, repeat)
        self._folder.add_run(run, requests)
        self._say(self._line(run, part, requests))
        if server.process and (death := server.process.death()):
            raise TopologyFailed(death)
        if reason := await settle(server, SETTLE_S):
            raise TopologyFailed(reason)
        return run, requests

    def _attainment(self, part: Part, requests: Sequence[RequestRecord]) -> float | None:
        slos = {stream.name: self._experiment.slo_of(stream) for stream in part.streams if stream.judged}
        return share([judge(one, slo).both for one in counts(requests) if (slo := slos.get(one.stream)) is not None])

    def _line(self, run: RunRecord, part: Part, requests: Sequence[RequestRecord]) -> str:
        judged = {stream.name for stream in part.streams if stream.judged}
        counted = [one for one in counts(requests) if one.stream in judged]
        ok = sum(one.status == "ok" for one in counted)
        attained = self._attainment(part, requests)
        parts = [f"{run.topology} {run.part} {run.point.label()} #{run.repeat + 1}: {ok} of {len(counted)} ok"]
        if attained is not None:
            parts.append(f"attainment {attained:.0%}")
        parts += [f"p99 late {run.lateness_p99_ms:.0f} ms"] if run.lateness_p99_ms is not None else []
        parts += ["saturated"] * run.saturated
        parts += [f"INVALID: {run.invalid}"] * bool(run.invalid) + [f"FAILED: {run.failed}"] * bool(run.failed)
        return ", ".join(parts)

    async def _bench_transports(self) -> None:
        """In a process of its own; its rows are plotted beside the served hand-offs."""
        wanted = self._experiment.transport_bench
        assert wanted is not None
        target = self._folder.directory / TRANSPORT
        command = [sys.executable, "-m", "benchmarks.bench_transport", "--json", str(target), *wanted.arguments]
        self._say(f"running benchmarks.bench_transport {' '.join(wanted.arguments)}")
        log = self._folder.logs / "bench_transport.log"
        reason = await asyncio.to_thread(_run_to_log, command, self._place.environ, log, wanted.timeout_s)
        if reason:
            self._say(f"skipped bench_transport: {reason}")
            self._manifest.skipped["bench_transport"] = reason

    def _say(self, text: str) -> None:
        self._console.print(text)


def _first_point(part: Part) -> Point:
    if part.search:
        return Point(part.search.start, part.prompt_tokens[0] if part.prompt_tokens else None)
    return part.points()[0]


def _run_to_log(command: Sequence[str], environ: Mapping[str, str], log: Path, timeout_s: float) -> str:
    """Why it failed; empty if it did not."""
    with log.open("wb") as file:
        try:
            code = subprocess.run(
                command, env=dict(environ), stdout=file, stderr=subprocess.STDOUT, timeout=timeout_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return f"it took longer than {timeout_s:g} s; see {log}"
        except OSError as error:
            return str(error)
    return f"it ended with code {code}; see {log}" if code else ""
