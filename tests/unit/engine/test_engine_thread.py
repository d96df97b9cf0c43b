"""The thread around core and runner: idle without work, alive after a failed step, loud when it dies."""

from __future__ import annotations

import queue
import threading
import time

import pytest
from engine_driver import VOCAB_SIZE, make_spec

from engine.core import EngineCore
from engine.engine_config import EngineConfig
from engine.engine_thread import EngineThread
from engine.errors import EngineError
from engine.fake_runner import FakeRunner, fake_layout, reference_output
from engine.messages import Abort, Add, Rejected, Release, TokensSampled
from wire.errors import InvalidTransition

DEADLINE_S = 10.0


class CountingCore(EngineCore):
    plans = 0
    checks = 0

    def plan(self, now):
        self.plans += 1
        return super().plan(now)

    def check_conservation(self):
        self.checks += 1
        super().check_conservation()


class Engine:
    """An engine thread whose events arrive in a queue, one batch each."""

    def __init__(self, **costs):
        layout = fake_layout(4)
        self.memory = bytearray(64 * layout.block_bytes)
        self.runner = FakeRunner(layout, memoryview(self.memory), 64, VOCAB_SIZE, 64, **costs)
        self.core = CountingCore(EngineConfig(), layout, 64, 64)
        self.batches = queue.SimpleQueue()
        self.failures = queue.SimpleQueue()
        self.callback_threads = set()
        self.thread = EngineThread(self.core, self.runner, self.on_events, on_failure=self.failures.put)

    def on_events(self, events):
        self.callback_threads.add(threading.current_thread().name)
        self.batches.put(events)

    def start(self):
        self.thread.start()
        self.thread.wait_ready(DEADLINE_S)

    def next(self):
        return self.batches.get(timeout=DEADLINE_S)

    def until_finished(self, *request_ids):
        open_ids, tokens = set(request_ids), {request_id: [] for request_id in request_ids}
        while open_ids:
            for event in self.next():
                if isinstance(event, TokensSampled):
                    tokens[event.request_id] += event.tokens
                if isinstance(event, Rejected) or event.finish is not None:
                    open_ids.discard(event.request_id)
        return tokens


@pytest.fixture
def engine():
    engine = Engine()
    yield engine
    engine.thread.stop(DEADLINE_S)


def wait_until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.001)


def test_sequences_submitted_from_many_threads_all_come_back(engine):
    engine.start()
    specs = [make_spec(f"r{index}", range(index, index + 9), 5) for index in range(8)]
    threads = [threading.Thread(target=engine.thread.submit, args=(Add(spec),)) for spec in specs]
    for thread in threads:
        thread.start()
    tokens = engine.until_finished(*(spec.request_id for spec in specs))
    for thread in threads:
        thread.join(DEADLINE_S)
    for spec in specs:
        assert tuple(tokens[spec.request_id]) == reference_output(spec, VOCAB_SIZE, 64).tokens
    assert engine.callback_threads == {"engine"}
    wait_until(lambda: engine.thread.stats().blocks_held == 0)
    assert engine.thread.stats().running == 0


def test_events_of_one_step_come_in_one_call(engine):
    for one in "abc":
        engine.thread.submit(Add(make_spec(one, [1, 2], 1)))
    engine.start()
    assert [event.request_id for event in engine.next()] == ["a", "b", "c"]


def test_idle_it_waits_without_planning_and_checks_its_books(engine):
    engine.start()
    wait_until(lambda: engine.core.checks == 1)
    plans = engine.core.plans
    time.sleep(0.05)
    assert (engine.core.plans, engine.core.checks) == (plans, 1)
    engine.thread.submit(Add(make_spec("a", [1, 2], 1)))
    engine.until_finished("a")
    wait_until(lambda: engine.core.checks == 2)


def test_a_lent_sequence_leaves_it_idle(engine):
    engine.start()
    engine.thread.submit(Add(make_spec("a", range(6), 3), export=True))
    engine.next()
    wait_until(lambda: engine.core.checks == 2)
    assert engine.thread.stats().exporting == 1
    engine.thread.submit(Release("a"))
    wait_until(lambda: engine.thread.stats().blocks_held == 0)


def test_a_runner_that_raises_costs_its_step_alone(engine, caplog):
    execute = engine.runner.execute
    engine.runner.execute = lambda plan: (_ for _ in ()).throw(MemoryError("no room on the device"))
    engine.start()
    engine.thread.submit(Add(make_spec("a", [1, 2], 3)))
    (event,) = engine.next()
    assert isinstance(event, Rejected)
    assert not event.invalid
    assert "MemoryError: no room on the device" in event.reason
    assert "step 1 failed" in caplog.text
    engine.runner.execute = execute
    engine.thread.submit(Add(make_spec("b", [1, 2], 3)))
    assert len(engine.until_finished("b")["b"]) == 3
    assert engine.thread.failure is None


def test_an_error_in_the_core_ends_the_thread_with_its_cause(engine, caplog):
    engine.thread.submit(Add(make_spec("bad", [], 3)))
    engine.thread.submit(Add(make_spec("a", [1, 2], 3)))
    engine.thread.submit(Release("a"))  # a is not lent: a bug of the caller
    engine.thread.start()
    # 1. What had come until then is delivered, then the failure.
    assert [event.request_id for event in engine.next()] == ["bad"]
    failure = engine.failures.get(timeout=DEADLINE_S)
    assert isinstance(failure, InvalidTransition)
    assert engine.thread.failure is failure
    # 2. Commands afterwards do nothing, and stop returns.
    engine.thread.submit(Abort("a"))
    engine.thread.stop(DEADLINE_S)
    assert "the engine thread failed" in caplog.text


def test_a_runner_that_cannot_warm_up_fails_the_start(engine, caplog):
    def warm_up():
        raise OSError("no kernel")

    engine.runner.warm_up = warm_up
    engine.thread.start()
    with pytest.raises(EngineError) as caught:
        engine.thread.wait_ready(DEADLINE_S)
    assert isinstance(caught.value.__cause__, OSError)


def test_waiting_for_a_slow_warm_up_has_a_deadline(engine):
    release = threading.Event()
    engine.runner.warm_up = lambda: release.wait(DEADLINE_S)
    engine.thread.start()
    with pytest.raises(TimeoutError, match="not warm"):
        engine.thread.wait_ready(0.01)
    release.set()


def test_stop_ends_after_the_step_that_runs():
    entered, release = threading.Event(), threading.Event()

    def sleep(_):
        entered.set()
        release.wait(DEADLINE_S)

    engine = Engine(step_s=1.0, sleep=sleep)
    engine.start()
    engine.thread.submit(Add(make_spec("a", [1, 2], 30)))
    assert entered.wait(DEADLINE_S)
    with pytest.raises(TimeoutError, match="still in a step"):
        engine.thread.stop(0.01)
    release.set()
    engine.thread.stop(DEADLINE_S)
    assert engine.thread.stats().steps == 1


def test_stop_before_start_and_twice():
    engine = Engine()
    engine.thread.stop(DEADLINE_S)
    started = Engine()
    started.start()
    started.thread.stop(DEADLINE_S)
    started.thread.stop(DEADLINE_S)


def test_the_clock_is_the_one_that_was_given():
    engine = Engine()
    ticks = iter(range(100))
    engine.thread = EngineThread(engine.core, engine.runner, engine.on_events, clock=lambda: float(next(ticks)))
    engine.thread.submit(Add(make_spec("a", [1, 2], 1)))
    engine.thread.start()
    (event,) = engine.next()
    assert (event.times.queue_s, event.times.compute_s) == (1.0, 1.0)
    engine.thread.stop(DEADLINE_S)
