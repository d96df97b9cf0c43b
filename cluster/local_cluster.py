"""Runs a cluster of local processes: the asyncio shell around `cluster.supervisor`.

signals ──▶ Lifecycle ──▶ LocalCluster ◀── control socket (kvrelay scale)
                            │    ▲
         start, SIGTERM, …  ▼    │ READY=1 by datagram, exits, output lines
                          child processes
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx

from cluster.child_process import ChildProcess, ProcessSpec
from cluster.control_socket import Done, Failed, ScaleRequest, serve_control
from cluster.errors import StartFailed
from cluster.run_directory import CONTROL_SOCKET, ClusterRecord, write_record
from cluster.supervisor import (
    Action,
    KillProcess,
    Phase,
    Report,
    RestartPolicy,
    StartProcess,
    Supervisor,
    TerminateProcess,
)
from service_kit.lifecycle import Lifecycle
from service_kit.notify import NOTIFY_VARIABLE, parse_notification
from wire.control import Role

NOTIFY_SOCKET = "notify.sock"
POLL_S = 0.05
ANSWER_S = 5.0
KILLED_S = 4.0
"""How long killed processes may take to be gone."""
MAX_WORKERS_PER_ROLE = 256


class LocalCluster:
    def __init__(
        self,
        *,
        directory: Path,
        port: int,
        url: str,
        desired: Mapping[Role, int],
        policy: RestartPolicy,
        spec_of: Callable[[str], ProcessSpec],
        on_line: Callable[[str, str], None],
        on_report: Callable[[str], None],
        on_up: Callable[[], None],
    ) -> None:
        """
        Args:
            directory: private to this cluster; the caller removes it.
            spec_of: how to start the process of a name, such as ``decode-1``.
            on_line: a process' name and a line that it wrote.
            on_up: called once, when the cluster answers requests.
        """
        self._directory = directory
        self._record = ClusterRecord(port=port, pid=os.getpid(), url=url, control=str(directory / CONTROL_SOCKET))
        self._supervisor = Supervisor(desired, policy)
        self._policy = policy
        self._spec_of = spec_of
        self._on_line = on_line
        self._on_report = on_report
        self._on_up = on_up
        self._children: dict[str, ChildProcess] = {}
        self._pending: dict[str, asyncio.Task[None]] = {}  # processes that are just being started
        self._unsent: dict[str, Action] = {}  # a signal that came before its process was there
        self._ready_pids: set[str] = set()  # heard of, but not started yet as far as we know
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[str], None]] = []

    async def run(self, lifecycle: Lifecycle) -> int:
        """Until the lifecycle's stop; returns the exit code.

        Raises:
            StartFailed: the cluster did not come up; everything is stopped.
        """
        coming_up: asyncio.Task[None] | None = None
        stopping = asyncio.create_task(lifecycle.stop_requested())
        try:
            async with self._notifications(), serve_control(Path(self._record.control), self._on_scale):
                write_record(self._directory, self._record)
                self._execute(self._supervisor.start(self._now()))
                coming_up = asyncio.create_task(self._come_up(lifecycle))
                while self._supervisor.phase is not Phase.DOWN:
                    if stopping.done():
                        self._execute(self._supervisor.stop(self._now()))
                    if coming_up.done() and not coming_up.cancelled() and coming_up.exception() is not None:
                        self._execute(self._supervisor.stop(self._now()))
                    await self._wait_for_change({stopping, coming_up})
                    self._execute(self._supervisor.on_tick(self._now()))
        finally:
            await self._end_everything([stopping, *([coming_up] if coming_up else [])])
        if self._supervisor.failure is not None:
            raise StartFailed(self._supervisor.failure)
        if coming_up is not None and coming_up.done() and not coming_up.cancelled():
            coming_up.result()
        return 0

    async def _wait_for_change(self, tasks: set[asyncio.Task[None]]) -> None:
        wakeup = self._supervisor.next_wakeup()
        timeout = None if wakeup is None else max(0.0, wakeup - self._now())
        changed = asyncio.create_task(self._changed.wait())
        try:
            pending = {task for task in tasks if not task.done()}
            await asyncio.wait({changed, *pending}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        self._changed.clear()

    async def _come_up(self, lifecycle: Lifecycle) -> None:
        """Wait until every process is ready and the front door says that it can serve."""
        deadline = self._now() + self._policy.start_s
        reason = "some processes are not ready"
        async with httpx.AsyncClient(timeout=ANSWER_S, trust_env=False) as client:
            while self._now() < deadline:
                if self._supervisor.phase is Phase.UP:
                    try:
                        answer = await client.get(f"{self._record.url}/ready")
                        if answer.status_code == httpx.codes.OK:
                            lifecycle.ready()
                            self._on_up()
                            return
                        reason = f"/ready answers {answer.status_code}: {answer.text[:200]}"
                    except httpx.HTTPError as error:
                        reason = f"/ready does not answer: {error}"
                elif self._supervisor.phase is not Phase.COMING_UP:
                    return
                await asyncio.sleep(POLL_S)
        raise StartFailed(f"the cluster did not come up within {self._policy.start_s:g} s: {reason}")

    # -- scaling --------------------------------------------------------------------------------------------------------

    async def _on_scale(self, request: ScaleRequest, report: Callable[[str], None]) -> Done | Failed:
        wanted = {Role.PREFILL: request.prefill, Role.DECODE: request.decode}
        counts = {role: count for role, count in wanted.items() if count is not None}
        for role, count in counts.items():
            least = 1 if role is Role.DECODE else 0
            if not least <= count <= MAX_WORKERS_PER_ROLE:
                return Failed(f"{role.value} must be from {least} to {MAX_WORKERS_PER_ROLE}")
        if self._supervisor.phase is not Phase.UP:
            return Failed(f"the cluster is {self._supervisor.phase.value}")
        deadline = self._now() + request.deadline_s
        self._listeners.append(report)
        try:
            self._execute(self._supervisor.scale(counts, self._now()))
            self._changed.set()
            while not self._supervisor.settled:
                if self._supervisor.phase is not Phase.UP:
                    return Failed("the cluster was stopped")
                if self._now() >= deadline:
                    states = ", ".join(f"{name} {state.value}" for name, state in self._supervisor.states.items())
                    return Failed(f"not done within {request.deadline_s:g} s: {states}")
                await asyncio.sleep(POLL_S)
        finally:
            self._listeners.remove(report)
        desired = self._supervisor.desired
        return Done(f"{desired[Role.PREFILL]} prefill and {desired[Role.DECODE]} decode workers are ready")

    # -- executing actions ----------------------------------------------------------------------------------------------

    def _execute(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Report):
                self._report(action.text)
            elif isinstance(action, StartProcess):
                self._report(f"starting {action.name}")
                self._pending[action.name] = asyncio.create_task(self._start(action.name))
            elif action.name in self._children:
                self._signal(action)
            else:
                self._unsent[action.name] = action

    def _signal(self, action: TerminateProcess | KillProcess) -> None:
        child = self._children[action.name]
        if isinstance(action, KillProcess):
            child.kill()
        else:
            self._report(f"draining {action.name}")
            child.terminate()

    async def _start(self, name: str) -> None:
        spec = self._spec_of(name)
        environ = {**spec.environ, NOTIFY_VARIABLE: str(self._directory / NOTIFY_SOCKET)}
        try:
            child = await ChildProcess.start(
                ProcessSpec(spec.command, environ),
                lambda line: self._on_line(name, line),
                lambda code: self._on_exit(name, code),
            )
        except OSError as error:
            self._report(f"{name} cannot be started: {error}")
            self._unsent.pop(name, None)
            self._on_exit(name, 127)
            return
        finally:
            del self._pending[name]
        self._children[name] = child
        self._note_ready(name)
        unsent = self._unsent.pop(name, None)
        if isinstance(unsent, TerminateProcess | KillProcess):
            self._signal(unsent)

    def _on_exit(self, name: str, code: int) -> None:
        self._children.pop(name, None)
        self._execute(self._supervisor.on_exit(name, code, self._now()))
        self._changed.set()

    def _report(self, text: str) -> None:
        self._on_report(text)
        for listener in self._listeners:
            listener(text)

    @asynccontextmanager
    async def _notifications(self) -> AsyncIterator[None]:
        """Hear READY=1 from children, by process id."""
        path = self._directory / NOTIFY_SOCKET
        receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        loop = asyncio.get_running_loop()
        try:
            receiver.setblocking(False)
            receiver.bind(str(path))
            loop.add_reader(receiver, self._on_notification, receiver)
            yield
        finally:
            loop.remove_reader(receiver)
            receiver.close()
            path.unlink(missing_ok=True)

    def _on_notification(self, receiver: socket.socket) -> None:
        with suppress(BlockingIOError):
            notification = parse_notification(receiver.recv(4096))
            if notification.get("READY") != "1":
                return
            self._ready_pids.add(notification.get("MAINPID", ""))
            for name in list(self._children):
                self._note_ready(name)

    def _note_ready(self, name: str) -> None:
        """A process may be ready before its start has returned here."""
        pid = str(self._children[name].pid)
        if pid in self._ready_pids:
            self._ready_pids.discard(pid)
            self._execute(self._supervisor.on_ready(name, self._now()))
            self._changed.set()

    async def _end_everything(self, tasks: list[asyncio.Task[None]]) -> None:
        """Leave no process behind, on whatever way out."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._pending:
            await asyncio.wait(self._pending.values(), timeout=KILLED_S)
        if self._children:
            self._report("killing " + ", ".join(self._children))
            self._execute(self._supervisor.kill(self._now()))
            for child in self._children.values():
                child.kill()
            await asyncio.wait([asyncio.ensure_future(child.wait()) for child in self._children.values()], timeout=KILLED_S)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
