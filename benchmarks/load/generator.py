"""Puts a planned load on a server: every request at its moment, whatever became of the ones before.

The schedule is absolute (start + planned moment), so one late send does not delay the next. How late each request left, and
how late the event loop itself woke up, is kept: a run whose client could not keep up says nothing about the server and is
declared invalid.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.load.client import Client, Target, make_session
from benchmarks.load.records import RequestRecord
from benchmarks.workloads.plan import PlannedTurn, Session, StreamPlan

LAG_PROBE_S = 0.02
STARTUP_S = 0.2
"""Between making the tasks and the first planned moment."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Requests scheduled within `warmup_s` are sent but do not count; `duration_s` follows; then `drain_s` at most."""

    warmup_s: float
    duration_s: float
    drain_s: float
    max_lateness_ms: float

    @property
    def window_s(self) -> float:
        return self.warmup_s + self.duration_s


@dataclass(slots=True)
class LoadResult:
    records: list[RequestRecord]
    took_s: float
    loop_lag_s: list[float] = field(default_factory=list)
    client_cpu_s: float = 0.0

    def lateness_s(self) -> list[float]:
        return [late for record in self.records if (late := record.lateness_s) is not None]

    def invalid_reason(self, max_lateness_ms: float) -> str:
        """Why the client did not keep up; empty = it did."""
        if not self.records:
            return "no request was planned within the run"
        late_ms = percentile_ms(self.lateness_s(), 99)
        lag_ms = percentile_ms(self.loop_lag_s, 99)
        if late_ms is None:
            return "no request was sent"
        if late_ms > max_lateness_ms:
            return f"requests were sent late: p99 {late_ms:.0f} ms, allowed {max_lateness_ms:g} ms"
        if lag_ms is not None and lag_ms > max_lateness_ms:
            return f"the client's event loop lagged: p99 {lag_ms:.0f} ms, allowed {max_lateness_ms:g} ms"
        return ""


def percentile_ms(seconds: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(np.asarray(seconds), percent) * 1e3) if len(seconds) else None


class LoadGenerator:
    def __init__(
        self,
        run_id: str,
        target: Target,
        plans: Sequence[StreamPlan],
        timing: Timing,
        on_token: Callable[[RequestRecord], None],
        on_end: Callable[[RequestRecord], None],
        on_start: Callable[[Callable[[], float]], None] = lambda clock: None,
    ) -> None:
        """
        Args:
            on_token, on_end: called on the loop, for a live display; they must be quick.
            on_start: called with the run's clock when its time begins to run.
        """
        self._run_id = run_id
        self._target = target
        self._plans = plans
        self._timing = timing
        self._on_token = on_token
        self._on_end = on_end
        self._on_start = on_start
        self._records: list[RequestRecord] = []
        self._lags: list[float] = []
        self._start = 0.0

    async def run(self) -> LoadResult:
        """Send everything, wait until it has ended or the drain time is over, and cut off what still runs."""
        gc.collect()
        gc.disable()  # a collection of all these records would show as latency
        try:
            async with make_session() as session:
                return await self._run(Client(session, self._target, self._clock))
        finally:
            gc.enable()

    def _clock(self) -> float:
        return time.monotonic() - self._start

    async def _run(self, client: Client) -> LoadResult:
        self._start = time.monotonic() + STARTUP_S
        cpu = time.process_time()
        tasks: set[asyncio.Task[None]] = set()
        for plan in self._plans:
            if plan.concurrency is None:
                tasks |= {asyncio.create_task(self._open_session(client, one)) for one in plan.sessions}
            else:
                queue = iter(plan.sessions)
                tasks |= {asyncio.create_task(self._closed_client(client, queue)) for _ in range(plan.concurrency)}
        self._on_start(self._clock)
        probe = asyncio.create_task(self._probe_lag())
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=STARTUP_S + self._timing.window_s + self._timing.drain_s)
        finally:
            took_s = self._clock()
            probe.cancel()
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(probe, *tasks, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):  # a bug of ours, never a failed request
                raise outcome
        self._records.sort(key=lambda record: (record.scheduled_s, record.stream, record.index))
        return LoadResult(self._records, took_s, self._lags, time.process_time() - cpu)

    async def _open_session(self, client: Client, session: Session) -> None:
        assert session.at_s is not None
        await self._conversation(client, session, session.at_s)

    async def _closed_client(self, client: Client, sessions: Iterator[Session]) -> None:
        for session in sessions:
            if self._clock() >= self._timing.window_s:
                return
            await self._conversation(client, session, max(0.0, self._clock()))

    async def _conversation(self, client: Client, session: Session, at_s: float) -> None:
        """Turn after turn; each holds all before it. A turn that fails ends the conversation."""
        history = ""
        known_tokens = 0
        for number, turn in enumerate(session.turns):
            if at_s >= self._timing.window_s:
                return
            await self._sleep_until(at_s)
            record = self._new_record(session, number, turn, at_s, known_tokens)
            history += turn.text
            history += await self._send(client, record, history, turn)
            if record.status != "ok":
                return
            known_tokens = record.planned_prompt_tokens + turn.output_tokens
            if number + 1 < len(session.turns):
                at_s = self._clock() + session.turns[number + 1].think_s

    async def _send(self, client: Client, record: RequestRecord, text: str, turn: PlannedTurn) -> str:
        sending = client.send(record, text, self._on_token)
        try:
            if turn.cancel_after_s is None:
                return await sending
            async with asyncio.timeout(turn.cancel_after_s):
                return await sending
        except TimeoutError:
            record.status = "cancelled"
            return ""
        finally:
            self._on_end(record)

    def _new_record(self, session: Session, number: int, turn: PlannedTurn, at_s: float, known_tokens: int) -> RequestRecord:
        record = RequestRecord(
            run=self._run_id,
            stream=session.stream,
            index=session.index,
            turn=number,
            scheduled_s=at_s,
            counted=at_s >= self._timing.warmup_s,
            planned_prompt_tokens=known_tokens + turn.prompt_tokens,
            planned_output_tokens=turn.output_tokens,
        )
        self._records.append(record)
        return record

    async def _sleep_until(self, at_s: float) -> None:
        if (wait_s := at_s - self._clock()) > 0:
            await asyncio.sleep(wait_s)

    async def _probe_lag(self) -> None:
        while True:
            due = time.monotonic() + LAG_PROBE_S
            await asyncio.sleep(LAG_PROBE_S)
            self._lags.append(max(0.0, time.monotonic() - due))
