"""Results of an experiment that never ran, with everything that a report can show: latencies are drawn from known laws."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from benchmarks.experiments.results import GoodputRow, Machine, Manifest, ResultFolder, Results
from benchmarks.experiments.spec import Experiment, Part
from benchmarks.load.records import Point, RequestRecord, RunRecord

EXPERIMENT = {
    "name": "made-up",
    "title": "Made up <with a tag>",
    "question": "Does the report show what is there?",
    "topologies": ["1p1d", "2c", "1c2"],
    "baseline": "2c",
    "slo": {"ttft_ms": 500, "tpot_ms": 60},
    "repeats": 2,
    "seed": 5,
    "parts": [
        {
            "name": "mixed",
            "loads": [1.0, 2.0],
            "warmup_s": 1.0,
            "duration_s": 9.0,
            "streams": [
                {"name": "chat", "arrivals": {"process": "poisson", "rate": 3.0}},
                {"name": "long", "arrivals": {"process": "constant", "rate": 0.5}, "judged": False},
            ],
        },
        {
            "name": "lengths",
            "loads": [1.0, 2.0],
            "prompt_tokens": [64, 256, 1024],
            "warmup_s": 0.0,
            "duration_s": 6.0,
            "streams": [{"name": "main", "arrivals": {"process": "poisson", "rate": 2.0}}],
        },
        {
            "name": "kill",
            "loads": [1.0],
            "warmup_s": 0.0,
            "duration_s": 10.0,
            "fault": {"target": "decode-0", "after_s": 4.0},
            "streams": [{"name": "main", "arrivals": {"process": "poisson", "rate": 3.0}}],
        },
        {
            "name": "goodput",
            "search": {"start": 1.0, "lowest": 0.5, "highest": 8.0},
            "streams": [{"name": "main", "arrivals": {"process": "poisson", "rate": 2.0}}],
        },
    ],
}
ITL_S = {"1p1d": 0.02, "2c": 0.04, "1c2": 0.05}
GOODPUTS = {"1p1d": 4.0, "2c": 6.0, "1c2": None}


def experiment(**changes: object) -> Experiment:
    return msgspec.convert(EXPERIMENT | changes, Experiment)


def manifest(spec: Experiment) -> Manifest:
    return Manifest(
        experiment=spec,
        topologies=spec.resolved_topologies(),
        machine=Machine("a CPU", "0-1", 2, 8.0, "Linux", 0.1),
        versions={"python": "3.11"},
        commit="abc",
        command="kvrelay bench run made-up",
        started="2026-01-01T00:00:00+00:00",
        complete=True,
        commands={"1p1d": "kvrelay up --prefill 1 --decode 1"},
        skipped={"vllm-cpu": "it is not there"},
        goodputs=[GoodputRow("goodput", name, 0, None, met, 8.0) for name, met in GOODPUTS.items()],
        kv_bytes_per_token=23_040,
    )


def made_up_results(slower: float = 1.0) -> Results:
    """
    Args:
        slower: factor on every gap between tokens.
    """
    spec = experiment()
    results = Results(manifest(spec), [], {}, transport_rows())
    number = 0
    for part in spec.parts:
        for point in part.points() if part.loads else []:
            for name, itl_s in ITL_S.items():
                for repeat in range(spec.repeats):
                    number += 1
                    run = made_up_run(f"{number:04d}", part, name, point, repeat)
                    rng = np.random.default_rng([number, 1])
                    results.runs.append(run)
                    results.requests[run.id] = [
                        one for stream in part.streams for one in requests(run, stream.name, itl_s * slower, rng)
                    ]
    broken = made_up_run("9999", spec.parts[0], "1c2", Point(2.0), 1)
    broken.invalid = "requests were sent late: p99 80 ms, allowed 50 ms"
    results.runs.append(broken)
    return results


def made_up_run(run_id: str, part: Part, topology: str, point: Point, repeat: int) -> RunRecord:
    return RunRecord(
        id=run_id,
        part=part.name,
        topology=topology,
        point=point,
        repeat=repeat,
        entropy=[1],
        started="2026-01-01T00:00:00+00:00",
        warmup_s=part.warmup_s,
        duration_s=part.duration_s,
        offered_rate=part.offered_rate(point.load),
        lateness_p99_ms=1.0,
        loop_lag_p99_ms=1.0,
        saturated=topology == "1c2" and point.load > 1,
        fault=part.fault,
        fault_s=part.fault.after_s if part.fault else None,
        server_cpu_s={"decode-0": 3.0},
    )


def requests(run: RunRecord, stream: str, itl_s: float, rng: np.random.Generator) -> list[RequestRecord]:
    window = run.warmup_s + run.duration_s
    made = []
    for index in range(4 if stream == "long" else 20):
        at = float(rng.uniform(0, window))
        first = at + float(rng.gamma(4.0, 0.02))
        tokens = [first, *(first + np.cumsum(rng.gamma(4.0, itl_s / 4, 12))).tolist()]
        killed = run.fault_s is not None and run.topology == "1p1d" and 0 < at - run.fault_s < 1.5
        record = RequestRecord(
            run=run.id,
            stream=stream,
            index=index,
            turn=0,
            scheduled_s=at,
            counted=at >= run.warmup_s,
            planned_prompt_tokens=run.point.prompt_tokens or 100 + 37 * index,
            planned_output_tokens=13,
            sent_s=at + 0.001,
            token_s=[] if killed else tokens,
            end_s=at + 0.1 if killed else tokens[-1],
            status="error" if killed else "ok",
            error="503 worker_failed" if killed else "",
            prompt_tokens=run.point.prompt_tokens or 100 + 37 * index,
            output_tokens=13,
            timeline=None if killed else timeline(run.topology),
        )
        made.append(record)
    return made


def timeline(topology: str) -> dict[str, float | None]:
    if topology == "1p1d":
        stages = {
            "reserve": 1.0,
            "prefill_queue": 2.0,
            "prefill": 40.0,
            "transfer": 9.0,
            "decode_queue": 1.0,
            "first_step": 8.0,
        }
        return {"route_ms": 0.1, **{f"{name}_ms": value for name, value in stages.items()}}
    return {"route_ms": 0.1, "prefill_ms": None, "transfer_ms": None, "decode_queue_ms": 3.0, "first_step_ms": 50.0}


def transport_rows() -> list[dict[str, object]]:
    return [
        {"bench": "handoff", "transport": name, "concurrency": 1, "bytes": size, "ms": size / speed / 1e6, "gb_per_s": speed}
        for name, speed in (("shm", 4.0), ("zmq-ipc", 1.5))
        for size in (65_536, 1 << 20, 16 << 20)
    ]


def written(directory: Path, results: Results) -> ResultFolder:
    folder = ResultFolder(directory)
    folder.create()
    folder.write_manifest(results.manifest)
    for run in results.runs:
        folder.add_run(run, results.requests.get(run.id, []))
    (directory / "transport.json").write_bytes(msgspec.json.encode(results.transport))
    return folder
