"""One run: a plan is made, put on a started topology, and written down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from rich.console import Console

from benchmarks.errors import TopologyFailed
from benchmarks.experiments.spec import Experiment, Part
from benchmarks.load.client import make_session
from benchmarks.load.generator import LoadGenerator, LoadResult, Timing, percentile_ms
from benchmarks.load.live import LiveDisplay
from benchmarks.load.records import Point, RequestRecord, RunRecord
from benchmarks.stats.saturation import is_saturated
from benchmarks.topologies.running import Started
from benchmarks.workloads.arrivals import Closed
from benchmarks.workloads.lengths import Fixed, Zipf
from benchmarks.workloads.plan import StreamPlan, plan_stream
from benchmarks.workloads.stream import Stream
from benchmarks.workloads.traces import TraceRow
from benchmarks.workloads.words import Words

WARM_UP_DRAIN_S = 30.0


class RunMaker:
    """What all runs of an experiment have in common."""

    def __init__(
        self,
        experiment: Experiment,
        words: Words,
        trace: Callable[[str], Sequence[TraceRow]],
        console: Console,
    ) -> None:
        self._experiment = experiment
        self._words = words
        self._trace = trace
        self._console = console
        self._number = 0

    def new_record(self, part: Part, topology: str, point: Point, repeat: int) -> RunRecord:
        self._number += 1
        return RunRecord(
            id=f"{self._number:04d}",
            part=part.name,
            topology=topology,
            point=point,
            repeat=repeat,
            entropy=self._experiment.entropy(part, point, repeat, 0)[:-1],
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            warmup_s=part.warmup_s,
            duration_s=part.duration_s,
            offered_rate=part.offered_rate(point.load),
            searched=part.search is not None,
            fault=part.fault,
        )

    def plans(self, part: Part, point: Point, repeat: int) -> list[StreamPlan]:
        """
        Raises:
            SpecError: a trace cannot be read.
        """
        return [
            plan_stream(
                stream,
                point.load,
                part.warmup_s + part.duration_s,
                self._experiment.entropy(part, point, repeat, number),
                self._words,
                self._trace,
            )
            for number, stream in enumerate(part.streams_at(point))
        ]

    async def warm_up(self, started: Started) -> None:
        """Requests that nobody counts: allocators and compilers of the server have seen work before the first run."""
        seconds = self._experiment.warm_up_s
        if not seconds:
            return
        stream = Stream("warm-up", Closed(2), Zipf(0.5, 16, 512), Fixed(8))
        plan = plan_stream(stream, 1.0, seconds, [self._experiment.seed], self._words, self._trace)
        timing = Timing(0.0, seconds, WARM_UP_DRAIN_S, self._experiment.max_lateness_ms)
        await LoadGenerator("warm-up", started.target, [plan], timing, lambda record: None, lambda record: None).run()

    async def run(self, started: Started, part: Part, point: Point, repeat: int) -> tuple[RunRecord, list[RequestRecord]]:
        """A server that fails its requests gives records that say so, and no exception.

        Raises:
            SpecError: a trace cannot be read.
        """
        record = self.new_record(part, started.topology.name, point, repeat)
        plans = self.plans(part, point, repeat)
        timing = Timing(part.warmup_s, part.duration_s, part.drain_s, self._experiment.max_lateness_ms)
        title = f"{started.topology.name} {part.name} {point.label()} #{repeat + 1}"
        before = started.process.cpu_s() if started.process else {}
        with LiveDisplay(self._console, title, timing.window_s) as display:
            faults: list[asyncio.Task[float]] = []

            def on_start(clock: Callable[[], float]) -> None:
                display.on_start(clock)
                if part.fault:
                    faults.append(asyncio.create_task(self._fault(started, record, part, clock)))

            generator = LoadGenerator(record.id, started.target, plans, timing, display.on_token, display.on_end, on_start)
            result = await generator.run()
        for fault in faults:
            try:
                record.fault_s = await fault
            except TopologyFailed as error:
                record.failed = str(error)
        if started.process:
            after = started.process.cpu_s()
            record.server_cpu_s = {name: round(after[name] - before.get(name, 0.0), 3) for name in after}
        self._judge(record, result, [plan.stream.name for plan in plans if plan.stream.judged])
        if started.process and (death := started.process.death()):
            record.failed = death
        return record, result.records

    @staticmethod
    async def _fault(started: Started, record: RunRecord, part: Part, clock: Callable[[], float]) -> float:
        """Kill the target at its moment; returns when, on the run's clock."""
        assert part.fault is not None
        due_s = record.warmup_s + part.fault.after_s
        async with make_session() as session:
            await started.cluster_state(session)  # the connection is there when it is needed
            await asyncio.sleep(max(0.0, due_s - clock()))
            await started.kill_worker(session, part.fault.target)
            return clock()

    def _judge(self, record: RunRecord, result: LoadResult, judged: Sequence[str]) -> None:
        records = [one for one in result.records if one.stream in judged]
        record.took_s = round(result.took_s, 3)
        record.num_requests = len(result.records)
        record.lateness_p99_ms = percentile_ms(result.lateness_s(), 99)
        record.lateness_max_ms = percentile_ms(result.lateness_s(), 100)
        record.loop_lag_p99_ms = percentile_ms(result.loop_lag_s, 99)
        record.client_cpu = round(result.client_cpu_s / max(result.took_s, 1e-9), 3)
        record.invalid = result.invalid_reason(self._experiment.max_lateness_ms)
        if not record.invalid and not any(one.counted for one in records):
            record.invalid = "no judged request arrived behind the warm-up"
        record.saturated = is_saturated(records, record.warmup_s, record.duration_s)


async def settle(started: Started, timeout_s: float) -> str:
    """Until the topology is as it was before the run; else why not."""
    try:
        async with make_session() as session:
            await started.wait_until_whole(session, timeout_s)
    except TopologyFailed as error:
        return str(error)
    return ""
