"""How fast bytes move from one process into a region of another, over each transport, beside memcpy and a plain socket.

    python -m benchmarks.bench_transport [--quick] [--json FILE]

This process sends and a child receives, each on one core of its own. Three experiments:

put      bare placement: `remote.put` until it returns, 64 KB to 1 GB, one and 16 at a time
handoff  as the services do it: checksums (xxh3-64 per block) on both sides, the sender's while the put runs, and the
         receiver's answer; beside a blocking socket that moves the same bytes with the same checksums
prompt   hand-offs of the default model's prompts: scattered blocks of 64 tokens (1,474,560 bytes in bf16)

Every round runs all transports one after the other, so that what else the machine does hits them alike; the best of the
rounds is reported, and CPU seconds are those of the median round, for one item of `bytes`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.transport_receiver import (
    BLOCK_BYTES,
    Addresses,
    SocketSender,
    block_ranges,
    connect_address,
    every_transport,
)
from service_kit.checksums import checksums, checksums_off_loop
from transport.base import Channel, RemoteRegion, Transport, Write
from transport.buffers import copy
from transport.memory import AnonymousMemory

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
KEY = 1
MAX_PUT_BYTES = 16 * MIB  # as the prefill service cuts its hand-offs
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB)
QUICK_SIZES = (64 * KIB, MIB, 16 * MIB, 64 * MIB)
PROMPT_BLOCKS = (1, 4, 16, 64)
AT_ONCE = 16
MAX_AT_ONCE_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True)
class Row:
    bench: str
    transport: str
    bytes: int
    concurrency: int
    gb_per_s: float
    ratio_memcpy: float
    sender_cpu_s: float
    receiver_cpu_s: float
    ms: float


@dataclass(frozen=True, slots=True)
class Case:
    bench: str
    nbytes: int
    concurrency: int
    blocks: int = 0  # scattered blocks instead of one range

    @property
    def total_bytes(self) -> int:
        return self.nbytes * self.concurrency

    def writes(self, source: memoryview) -> list[list[Write]]:
        """What each of the concurrent items puts, with nothing in the same place."""
        if self.blocks:
            # Every other block of the region, so that nothing is adjacent at the receiver.
            starts = [(2 * n, n) for n in range(self.blocks)]
            return [[Write(to * BLOCK_BYTES, source[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES]) for to, at in starts]]
        return [[Write(start, source[start : start + self.nbytes])] for start in range(0, self.total_bytes, self.nbytes)]


Run = Callable[[Case], Awaitable[None]]
Cpu = Callable[[], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    run: Run
    receiver_cpu: Cpu


@dataclass(slots=True)
class Sample:
    seconds: float
    sender_cpu_s: float
    receiver_cpu_s: float


class PutRunner:
    """One transport's channel to the receiver."""

    def __init__(self, channel: Channel, region: RemoteRegion, source: memoryview) -> None:
        self._channel = channel
        self._region = region
        self._source = source

    async def run(self, case: Case) -> None:
        items = case.writes(self._source)
        if case.bench == "put":
            await asyncio.gather(*(self._region.put(KEY, writes) for writes in items))
            return
        puts = [part for writes in items for part in _cut_puts(writes)]
        sums = [sum_ for found in await asyncio.gather(*map(self._put_and_sum, puts)) for sum_ in found]
        ranges = [(w.offset, len(w.source)) for writes in puts for w in writes]
        await self._channel.send(json.dumps({"ranges": ranges, "sums": sums}).encode())
        answer = (await self._channel.recv()).header
        if answer != b"intact":
            raise RuntimeError(f"the receiver says {answer!r}")

    async def receiver_cpu(self) -> float:
        await self._channel.send(b'{"cpu": true}')
        return float((await self._channel.recv()).header)

    async def _put_and_sum(self, writes: list[Write]) -> tuple[int, ...]:
        blocks = [memoryview(w.source)[a:b] for w in writes for a, b in block_ranges(len(w.source))]
        sums, _ = await asyncio.gather(checksums_off_loop(blocks), self._region.put(KEY, writes))
        return sums


def _cut_puts(writes: list[Write]) -> Iterator[list[Write]]:
    """As the prefill service does: at most MAX_PUT_BYTES a put."""
    part: list[Write] = []
    room = MAX_PUT_BYTES
    for write in writes:
        source = memoryview(write.source)
        for start in range(0, len(source), MAX_PUT_BYTES):
            piece = source[start : start + MAX_PUT_BYTES]
            if len(piece) > room and part:
                yield part
                part, room = [], MAX_PUT_BYTES
            part.append(Write(write.offset + start, piece))
            room -= len(piece)
    if part:
        yield part


class Bench:
    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self.rows: list[Row] = []

    async def compare(self, case: Case, contenders: list[Contender]) -> None:
        """The first contender is memcpy."""
        samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
        repeats = max(1, min(50, 32 * MIB // case.total_bytes))
        for contender in contenders:
            await contender.run(case)  # pages, buffers and connections are warm
        for _ in range(max(3, min(self._rounds, 16 * GIB // case.total_bytes))):
            for contender in contenders:
                samples[contender.name].append(await _measure(contender, case, repeats))
        memcpy_s = min(sample.seconds for sample in samples[contenders[0].name])
        for name, found in samples.items():
            best_s = min(sample.seconds for sample in found)
            row = Row(
                bench=case.bench,
                transport=name,
                bytes=case.nbytes,
                concurrency=case.concurrency,
                gb_per_s=round(case.total_bytes / best_s / 1e9, 3),
                ratio_memcpy=round(memcpy_s / best_s, 3),
                sender_cpu_s=round(statistics.median(s.sender_cpu_s for s in found) / case.concurrency, 7),
                receiver_cpu_s=round(statistics.median(s.receiver_cpu_s for s in found) / case.concurrency, 7),
                ms=round(best_s * 1e3, 4),
            )
            self.rows.append(row)
            print(  # noqa: T201  the table is what the command is for
                f"{row.bench:8}{row.transport:12}{_size(row.bytes):>8} x{row.concurrency:<3}{row.gb_per_s:8.2f} GB/s"
                f"{row.ratio_memcpy:8.2f} of memcpy{row.ms:10.3f} ms   CPU ms {row.sender_cpu_s * 1e3:.3f} + "
                f"{row.receiver_cpu_s * 1e3:.3f}",
                flush=True,
            )


async def _measure(contender: Contender, case: Case, repeats: int) -> Sample:
    theirs = await contender.receiver_cpu()
    mine, start = time.process_time(), time.perf_counter()
    for _ in range(repeats):
        await contender.run(case)
    seconds, mine = time.perf_counter() - start, time.process_time() - mine
    theirs = await contender.receiver_cpu() - theirs
    return Sample(seconds / repeats, mine / repeats, theirs / repeats)


def _size(nbytes: int) -> str:
    for unit, name in ((GIB, "GB"), (MIB, "MB"), (KIB, "KB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def _memcpy(source: memoryview, target: memoryview) -> Run:
    """One copy within a process, with checksums of both sides where the experiment has them."""

    async def run(case: Case) -> None:
        for writes in case.writes(source):
            for write in writes:
                view = memoryview(write.source)
                copy(target[write.offset : write.offset + len(view)], view)
                if case.bench != "put":
                    for side in (view, target[write.offset : write.offset + len(view)]):
                        checksums([side[a:b] for a, b in block_ranges(len(view))])

    return run


def _socket(sender: SocketSender, source: memoryview) -> Run:
    async def run(case: Case) -> None:
        for writes in case.writes(source):
            sender.send([(w.offset, memoryview(w.source)) for w in writes], with_checksums=case.bench != "put")

    return run


async def _no_cpu() -> float:
    return 0.0


async def _contenders(
    transports: dict[str, Transport], addresses: Addresses, source: memoryview, target: memoryview
) -> tuple[list[Contender], list[SocketSender]]:
    contenders = [Contender("memcpy", _memcpy(source, target), _no_cpu)]
    sockets = []
    for kind, address in addresses.sockets.items():
        sender = SocketSender(connect_address(address))
        sockets.append(sender)
        contenders.append(Contender(kind, _socket(sender, source), sender.receiver_cpu))
    for kind, address in addresses.channels.items():
        transport = transports[kind.split("-")[0]]
        channel = await transport.connect(address, asyncio.get_running_loop().time() + 10)
        await channel.send(b'{"region": true}')
        runner = PutRunner(channel, await channel.open_region((await channel.recv()).header), source)
        contenders.append(Contender(kind, runner.run, runner.receiver_cpu))
    return contenders, sockets


def _cases(sizes: tuple[int, ...]) -> Iterator[Case]:
    for bench in ("put", "handoff"):
        for nbytes in sizes:
            yield Case(bench, nbytes, 1)
            if nbytes * AT_ONCE <= MAX_AT_ONCE_BYTES:
                yield Case(bench, nbytes, AT_ONCE)
    for blocks in PROMPT_BLOCKS:
        yield Case("prompt", blocks * BLOCK_BYTES, 1, blocks)


async def _run(arguments: argparse.Namespace) -> list[Row]:
    sizes = QUICK_SIZES if arguments.quick else SIZES
    region_bytes = max(max(sizes), MAX_AT_ONCE_BYTES, 2 * max(PROMPT_BLOCKS) * BLOCK_BYTES)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    source, target = AnonymousMemory(region_bytes), AnonymousMemory(region_bytes)
    block = os.urandom(MIB)
    for start in range(0, region_bytes, MIB):
        source.view[start : start + MIB] = block[: region_bytes - start]
        target.view[start : start + MIB] = bytes(min(MIB, region_bytes - start))
    transports = every_transport()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.transport_receiver", folder]
        command += [str(region_bytes), str(cores[-1]), str(os.getpid())]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220  nothing else runs yet
        try:
            assert child.stdout is not None
            line = await asyncio.wait_for(asyncio.to_thread(child.stdout.readline), 60)
            addresses = Addresses(**json.loads(line))
            contenders, sockets = await _contenders(transports, addresses, source.view, target.view)
            bench = Bench(arguments.rounds)
            for case in _cases(sizes):
                if arguments.only in ("", case.bench):
                    await bench.compare(case, contenders)
            for sender in sockets:
                sender.close()
        finally:
            child.terminate()
            child.wait()
            for transport in transports.values():
                await transport.close()
    return bench.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="four sizes, up to 64 MB")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each case (default: 15)")
    parser.add_argument("--only", choices=("", "put", "handoff", "prompt"), default="", help="one experiment")
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = runner.run(_run(arguments))
    if arguments.json is not None:
        arguments.json.write_text("[\n" + ",\n".join(json.dumps(_plain(row)) for row in rows) + "\n]\n")


def _plain(row: Row) -> dict[str, object]:
    return {name: getattr(row, name) for name in Row.__slots__}


if __name__ == "__main__":
    main()
