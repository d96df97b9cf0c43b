"""What kvrelay costs beside the model: scheduler, wire and coordinator on their own, with the fake runner.

    python -m benchmarks.bench_overhead [--json FILE]                 scheduler and wire          (about 20 seconds)
    python -m benchmarks.bench_overhead --model DIR [--json FILE]     and the coordinator         (about 1 minute)

    scheduler      EngineCore alone: plan and apply of a decode step, with a runner that does nothing
    engine         the same behind the engine's thread, with the fake runner: commands in, events out
    codec          a step's TokenBatch, encoded by D and decoded by the coordinator
    channel        the same through an outbox and a ZeroMQ channel, both ends on one loop and one core
    coordinator    streamed over HTTP from a cluster with the fake runner: wall rate, and the coordinator's own CPU time

Each figure is a rate with the batch that it was taken at: steps/s, tokens/s or messages/s; the first four by CPU time of
their one core, so that other work on the machine hardly moves them. The coordinator is pinned to the first core that this
process may use, workers and clients to the others; of its two rates the one per CPU second is the one that can be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.bench_overhead_stream import stream_rate
from engine.core import EngineCore
from engine.engine_config import EngineConfig
from engine.engine_thread import EngineThread
from engine.fake_runner import FakeRunner, fake_layout
from engine.messages import Add, EngineEvent, Fill, Reserve, TokensSampled
from engine.plan import StepPlan, StepResult
from service_kit.outbox import Outbox
from transport.base import Channel
from transport.options import TransportOptions
from transport.registry import create_transport
from wire.codec import worker_codec
from wire.control import TokenBatch, TokenDelta
from wire.ids import RequestId
from wire.sequence import SampledToken, SamplingParams, SequenceSpec, StopRules

_BLOCK_SIZE = 64
_VOCAB_SIZE = 49_152
_CONTEXT = 64
_MAX_MODEL_LEN = 1 << 20
_CONNECT_S = 10.0
_CHANNEL_S = 120.0
_SCHEDULED_TOKENS = 1 << 20  # the scheduler's figure ends there, if its time is not up


@dataclass(frozen=True, slots=True)
class Row:
    bench: str
    engine: str
    threads: int
    batch: int  # sequences
    context: int
    dtype: str
    value: float
    unit: str


def _row(bench: str, batch: int, value: float, unit: str) -> Row:
    return Row(bench, "kvrelay-fake", 1, batch, _CONTEXT, "uint8", value, unit)


# -- scheduler and engine ---------------------------------------------------------------------------------------------


def _specs(batch: int, max_tokens: int) -> list[SequenceSpec]:
    sampling, stop = SamplingParams(seed=0, temperature=0.0), StopRules(max_tokens=max_tokens, ignore_eos=True)
    return [
        SequenceSpec(RequestId(f"r{number}"), tuple(range(number, number + _CONTEXT - 1)), sampling, stop)
        for number in range(batch)
    ]


def _core(batch: int, tokens_each: int) -> tuple[EngineCore, int]:
    layout = fake_layout(_BLOCK_SIZE)
    num_blocks = batch * (layout.blocks_for(_CONTEXT + tokens_each) + 1) + 2
    config = EngineConfig(max_batched_tokens=max(512, batch), max_num_sequences=max(256, batch))
    return EngineCore(config, layout, num_blocks, _MAX_MODEL_LEN), num_blocks


def scheduler(batch: int, seconds: float) -> list[Row]:
    """Plan and apply; every drawn token is made before the clock starts."""
    most_steps = _SCHEDULED_TOKENS // batch
    steps_at_once = max(16, 4096 // batch)
    core, _ = _core(batch, most_steps)
    for spec in _specs(batch, most_steps):
        for command in (Reserve(spec), Fill(spec.request_id, SampledToken(1))):
            core.handle(command, 0.0)
    drawn = {RequestId(f"r{number}"): SampledToken(7) for number in range(batch)}
    steps, spent = 0, 0.0
    while spent < seconds and steps + 2 * steps_at_once < most_steps:
        started = time.process_time()
        for _ in range(steps_at_once):
            plan = core.plan(0.0)
            assert plan is not None
            core.apply(plan, StepResult(plan.step, drawn), 0.0)
        spent += time.process_time() - started
        steps += steps_at_once
    rate = steps / spent
    return [_row("scheduler", batch, rate, "steps/s"), _row("scheduler", batch, rate * batch, "tokens/s")]


class _CountingRunner:
    """The fake runner, and how long it took of the whole."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner
        self.layout = runner.layout
        self.vocab_size = runner.vocab_size
        self.max_model_len = runner.max_model_len
        self.seconds = 0.0
        self.steps = 0

    def warm_up(self) -> None:
        self._runner.warm_up()

    def execute(self, plan: StepPlan) -> StepResult:
        started = time.thread_time()
        result = self._runner.execute(plan)
        self.seconds += time.thread_time() - started
        self.steps += 1
        return result


def engine(batch: int, seconds: float) -> list[Row]:
    """All sequences from their prompts on; ends when each has drawn its tokens."""
    tokens_each = 256
    core, num_blocks = _core(batch, tokens_each)
    layout = fake_layout(_BLOCK_SIZE)
    memory = memoryview(bytearray(num_blocks * layout.block_bytes))
    runner = _CountingRunner(FakeRunner(layout, memory, num_blocks, _VOCAB_SIZE, _MAX_MODEL_LEN))
    left, over = [0], threading.Event()

    def on_events(events: tuple[EngineEvent, ...]) -> None:
        left[0] -= sum(isinstance(event, TokensSampled) and event.finish is not None for event in events)
        if left[0] == 0:
            over.set()

    thread = EngineThread(core, runner, on_events)
    thread.start()
    thread.wait_ready(30.0)
    steps, spent, in_runner = 0, 0.0, 0.0
    while spent < seconds:
        left[0] = batch
        over.clear()
        runner.seconds, runner.steps = 0.0, 0
        started = time.process_time()
        for spec in _specs(batch, tokens_each):
            thread.submit(Add(spec))
        if not over.wait(120.0):
            raise SystemExit("bench_overhead: the engine did not finish within 120 s")
        spent += time.process_time() - started
        steps, in_runner = steps + runner.steps, in_runner + runner.seconds
    thread.stop(10.0)
    return [
        _row("engine", batch, steps / spent, "steps/s"),
        _row("engine", batch, steps * batch / spent, "tokens/s"),
        _row("engine", batch, 1e6 * (spent - in_runner) / steps, "us/step beside the runner"),
    ]


# -- wire -------------------------------------------------------------------------------------------------------------


def _token_batch(batch: int) -> TokenBatch:
    return TokenBatch(
        tuple(
            TokenDelta(RequestId(f"seq-{number:08x}-{number:08x}-0"), 17, (SampledToken(1000),)) for number in range(batch)
        )
    )


def codec(batch: int, seconds: float) -> list[Row]:
    message, both = _token_batch(batch), worker_codec()
    rate = _rate(lambda: both.decode(both.encode(message)), seconds)
    return [_row("codec", batch, rate, "messages/s"), _row("codec", batch, rate * batch, "tokens/s")]


async def channel(batch: int, seconds: float) -> list[Row]:
    """One-way, as fast as the receiver takes them."""
    transport = create_transport("zmq", TransportOptions())
    message, decoder = _token_batch(batch), worker_codec()
    rates: list[float] = []
    done = asyncio.Event()

    async def receive(accepted: Channel) -> None:
        decoder.decode((await accepted.recv()).header)
        received, began = 0, time.process_time()
        while (spent := time.process_time() - began) < seconds:
            decoder.decode((await accepted.recv()).header)
            received += 1
        rates.append(received / spent)
        done.set()

    listener = await transport.listen("tcp://127.0.0.1:0", receive)
    connected = await transport.connect(listener.address, asyncio.get_running_loop().time() + _CONNECT_S)
    outbox = Outbox(connected)
    sending = asyncio.create_task(outbox.run())
    async with asyncio.timeout(_CHANNEL_S):  # a channel that breaks never flushes
        while not done.is_set():
            for _ in range(8):
                outbox.post(message)
            await outbox.flush()
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    connected.abort()
    await listener.close()
    await transport.close()
    return [_row("channel", batch, rates[0], "messages/s"), _row("channel", batch, rates[0] * batch, "tokens/s")]


def _rate(work: Callable[[], object], seconds: float) -> float:
    """Calls per second."""
    count, started = 0, time.process_time()
    while (spent := time.process_time() - started) < seconds:
        for _ in range(16):
            work()
        count += 16
    return count / spent


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument(
        "--model", type=Path, help="a converted model's folder, for its tokenizer: measures the coordinator too"
    )
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 64, 512])
    parser.add_argument("--seconds", type=float, default=1.0, help="of each figure")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--stream-seconds", type=float, default=15.0)
    parser.add_argument("--json", type=Path, help="write the rows here")
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace, report: Callable[[str], object]) -> list[Row]:
    rows: list[Row] = []

    def add(found: list[Row]) -> None:
        rows.extend(found)
        report(f"{found[0].bench:12} {found[0].batch:4}   " + "   ".join(f"{row.value:12,.0f} {row.unit}" for row in found))

    for batch in arguments.batches:
        add(scheduler(batch, arguments.seconds))
    for batch in arguments.batches:
        add(engine(batch, arguments.seconds))
    for batch in arguments.batches:
        add(codec(batch, arguments.seconds))
    for batch in arguments.batches:
        add(asyncio.run(channel(batch, arguments.seconds)))
    if arguments.model is not None:
        cores = sorted(os.sched_getaffinity(0))
        found = stream_rate(arguments.model, arguments.clients, arguments.stream_seconds, cores)
        clients = arguments.clients
        add(
            [
                _row("coordinator", clients, found.tokens_per_s, "tokens/s"),
                _row("coordinator", clients, found.tokens_per_cpu_s, "tokens/s of the coordinator's CPU"),
                _row("coordinator", clients, 100 * found.cpu_share, "% of a core"),
            ]
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _arguments(argv)
    rows = run(arguments, lambda line: sys.stdout.write(line + "\n"))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
