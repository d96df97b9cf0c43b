"""A worker's process from its start to its exit code, with a coordinator that only says welcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from service_kit.lifecycle import Lifecycle, Stage
from service_kit.worker_process import WorkerProcess
from service_kit.worker_settings import WorkerSettings
from transport.base import Channel
from transport.errors import ChannelClosed
from transport.options import TransportOptions
from transport.registry import create_transport
from wire.codec import worker_codec
from wire.control import CoordinatorMessage, Drain, Heartbeat, Leaving, Register, Role, Welcome, WorkerLoad, WorkerMessage
from wire.ids import Incarnation
from wire.kv_layout import Fingerprint, KvLayout


class Model:
    fingerprint = Fingerprint("weights", "layout")
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
    num_blocks = 4
    max_model_len = 64
    vocab_size = 10


class Service:
    """Does nothing, but for as long as it is told to."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.idle = True
        self.draining = False
        self.died_of: BaseException | None = None
        self.stages_at_registration: list[Stage] = []
        self._lifecycle = lifecycle

    def begin_drain(self) -> None:
        self.draining = True

    def tick(self) -> None:
        pass

    def load(self) -> WorkerLoad:
        return WorkerLoad()

    def on_engine_dead(self, error: BaseException) -> None:
        self.died_of = error

    def on_registered(self) -> None:
        self.stages_at_registration.append(self._lifecycle.stage)

    def on_message(self, message: CoordinatorMessage) -> None:
        if isinstance(message, Drain):
            self.begin_drain()

    def on_coordinator_lost(self) -> None:
        pass


class Scene:
    """One worker and, once `listen` was called, its coordinator."""

    def __init__(self, lifecycle: Lifecycle, address: str) -> None:
        self.lifecycle = lifecycle
        self.service = Service(lifecycle)
        self.worker = WorkerProcess(WorkerSettings(coordinator=address), Role.DECODE)
        self.heard: list[WorkerMessage] = []
        self.channel: Channel | None = None
        self._address = address
        self._codec = worker_codec()
        self._transport = create_transport("zmq", TransportOptions())

    async def listen(self) -> None:
        await self._transport.listen(self._address, self._serve)

    async def registered(self) -> None:
        async with asyncio.timeout(5):
            while not self.service.stages_at_registration:
                await asyncio.sleep(0.01)

    async def tell(self, message: CoordinatorMessage) -> None:
        assert self.channel is not None
        await self.channel.send(self._codec.encode(message))

    async def close(self) -> None:
        await self._transport.close()

    async def _serve(self, channel: Channel) -> None:
        self.channel = channel
        try:
            while True:
                message: WorkerMessage = self._codec.decode((await channel.recv()).header)
                self.heard.append(message)
                if isinstance(message, Register):
                    await self.tell(Welcome(Incarnation("c0"), heartbeat_interval_s=0.05, lease_s=30.0))
        except ChannelClosed:
            pass


def play(path: Path, script: Callable[[Scene], Coroutine[None, None, None]], drain_s: float = 5.0) -> tuple[int, Scene]:
    """Run a worker while `script` happens to it; its exit code."""
    scenes: list[Scene] = []

    async def main(lifecycle: Lifecycle) -> int:
        scene = Scene(lifecycle, f"ipc://{path}/control.sock")
        scenes.append(scene)
        serving = scene.worker.serve(lifecycle, scene.service, Model(), max_num_sequences=4)
        try:
            async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:  # a script that fails ends the worker
                tasks.create_task(script(scene))
                return await serving
        finally:
            await scene.close()

    code = Lifecycle(drain_s).run(main)
    return code, scenes[0]


def test_ready_means_registered_and_a_drained_worker_says_goodbye(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        # 1. Nobody to register with: not ready.
        await asyncio.sleep(0.1)
        assert scene.lifecycle.stage is Stage.STARTING
        # 2. Registered: ready, by the time the service hears of it.
        await scene.listen()
        await scene.registered()
        # 3. Told to stop, with nothing to do.
        scene.lifecycle.request_stop("test")

    code, scene = play(tmp_path, script)
    assert code == 0
    assert scene.service.stages_at_registration == [Stage.READY]
    assert [type(message) for message in scene.heard[:2]] == [Register, Heartbeat]
    assert scene.heard[-1] == Leaving(scene.worker.incarnation, finished=True)


def test_a_stop_before_the_registration_ends_at_once(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        scene.service.idle = False
        await asyncio.sleep(0.1)
        scene.lifecycle.request_stop("test")

    started = time.monotonic()
    code, scene = play(tmp_path, script, drain_s=60.0)
    assert code == 0
    assert time.monotonic() - started < 5.0
    assert not scene.service.draining


@pytest.mark.parametrize("by_coordinator", [False, True])
def test_a_drain_that_its_deadline_cuts_short_is_code_1(tmp_path: Path, by_coordinator: bool) -> None:
    async def script(scene: Scene) -> None:
        scene.service.idle = False
        await scene.listen()
        await scene.registered()
        if by_coordinator:
            await scene.tell(Drain(60.0))
        else:
            scene.lifecycle.request_stop("test")

    code, scene = play(tmp_path, script, drain_s=0.1)
    assert code == 1
    assert scene.service.draining
    assert scene.heard[-1] == Leaving(scene.worker.incarnation, finished=True)


@pytest.mark.parametrize("draining", [False, True])
def test_a_dead_engine_ends_the_worker_even_while_it_drains(tmp_path: Path, draining: bool) -> None:
    error = RuntimeError("boom")

    async def script(scene: Scene) -> None:
        scene.service.idle = False
        await scene.listen()
        await scene.registered()
        if draining:
            scene.lifecycle.request_stop("test")
            await asyncio.sleep(0.1)
        scene.worker.on_engine_dead(error)

    started = time.monotonic()
    code, scene = play(tmp_path, script, drain_s=60.0)
    assert code == 1
    assert time.monotonic() - started < 5.0
    assert scene.service.died_of is error
