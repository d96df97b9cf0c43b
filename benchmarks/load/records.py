"""What is written down of every request and every run, as JSON lines.

Times are seconds from the start of the run, by one monotonic clock. A request's latencies count from the moment that it was
*scheduled* for, not from when the client got round to it: a slow server cannot make its own load lighter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

Status = Literal["ok", "error", "cancelled", "unfinished"]
"""`cancelled`: by the plan. `unfinished`: still running when the run was cut off, and counted as a failure."""


class RequestRecord(msgspec.Struct, omit_defaults=True):
    run: str
    stream: str
    index: int
    turn: int
    scheduled_s: float
    counted: bool  # behind the warm-up
    planned_prompt_tokens: int
    planned_output_tokens: int
    sent_s: float | None = None
    first_byte_s: float | None = None
    token_s: list[float] = []  # one per streamed piece of text, in order
    end_s: float | None = None
    status: Status = "unfinished"
    http_status: int | None = None
    error: str = ""
    prompt_tokens: int | None = None  # as the server counts them
    output_tokens: int | None = None
    cached_tokens: int | None = None
    timeline: dict[str, Any] | None = None  # the server's own, in milliseconds

    @property
    def lateness_s(self) -> float | None:
        return None if self.sent_s is None else self.sent_s - self.scheduled_s


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process of the cluster that is killed in mid-run."""

    target: str  # a worker's id, such as decode-0
    after_s: float  # behind the warm-up


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where in an experiment's space a run lies. `prompt_tokens` is None unless the experiment varies it."""

    load: float
    prompt_tokens: int | None = None

    def label(self) -> str:
        return f"load {self.load:g}" + (f", prompt {self.prompt_tokens}" if self.prompt_tokens is not None else "")


class RunRecord(msgspec.Struct, kw_only=True):
    """One run of a workload against one topology. A run that failed or is invalid has a record like every other."""

    id: str
    part: str
    topology: str
    point: Point
    repeat: int
    entropy: list[int]
    started: str  # wall-clock, for the reader alone
    warmup_s: float
    duration_s: float  # behind the warm-up
    took_s: float = 0.0  # warm-up, run and drain together
    offered_rate: float | None = None  # requests per second of the judged streams, planned; None: not decided by the plan
    num_requests: int = 0
    lateness_p99_ms: float | None = None
    lateness_max_ms: float | None = None
    loop_lag_p99_ms: float | None = None
    client_cpu: float = 0.0  # CPU seconds of the load generator per second
    invalid: str = ""  # why its latencies say more about the client than about the server
    failed: str = ""  # why there are none
    saturated: bool = False
    searched: bool = False  # one of a goodput search's probes
    fault: Fault | None = None
    fault_s: float | None = None  # when it happened
    server_cpu_s: dict[str, float] = {}  # by process, over the run, where we can see them

    @property
    def usable(self) -> bool:
        return not self.invalid and not self.failed


def append_records(path: Path, records: Iterable[msgspec.Struct]) -> None:
    encoder = msgspec.json.Encoder()
    with path.open("ab") as file:
        for record in records:
            file.write(encoder.encode(record) + b"\n")


def read_requests(path: Path) -> Iterator[RequestRecord]:
    yield from _read(path, RequestRecord)


def read_runs(path: Path) -> list[RunRecord]:
    return list(_read(path, RunRecord))


def _read(path: Path, kind: type[Any]) -> Iterator[Any]:
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as file:
        for line in file:
            yield decoder.decode(line)
