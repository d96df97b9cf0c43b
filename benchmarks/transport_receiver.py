"""The receiving process of `bench_transport`: a region over every transport, and plain blocking sockets."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import uvloop

from service_kit.checksums import checksums, checksums_off_loop
from service_kit.parent import end_with_parent
from transport.base import ByteRange, Channel, Region, Transport
from transport.curve import keys_of
from transport.options import TransportOptions
from transport.registry import available_schemes, create_transport

BLOCK_BYTES = 64 * 23_040  # 64 tokens of the default model in bf16
KEY = 1
_HEAD = struct.Struct("<QQ?")  # offset, bytes, with checksums; no bytes: what CPU time was used?
_SUM = struct.Struct("<Q")
_CPU = struct.Struct("<d")
_SOCKET_BUFFER_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Addresses:
    channels: dict[str, str]
    sockets: dict[str, str]


def block_ranges(nbytes: int) -> Iterator[tuple[int, int]]:
    """What one checksum covers."""
    for start in range(0, nbytes, BLOCK_BYTES):
        yield start, min(start + BLOCK_BYTES, nbytes)


def connect_address(address: str) -> socket.socket:
    if address.startswith("/"):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(address)
    else:
        connection = socket.create_connection(("127.0.0.1", int(address)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


class SocketSender:
    """Blocking: each block is hashed, then sent; the answer ends the item."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)

    def send(self, parts: list[tuple[int, memoryview]], *, with_checksums: bool) -> None:
        for offset, view in parts:
            self._connection.sendall(_HEAD.pack(offset, len(view), with_checksums))
            if not with_checksums:
                self._connection.sendall(view)
                continue
            for start, end in block_ranges(len(view)):
                self._connection.sendall(view[start:end])
                self._connection.sendall(_SUM.pack(*checksums([view[start:end]])))
        for _ in parts:
            if (answer := self._connection.recv(1)) != b"1":
                raise RuntimeError(f"a wrong checksum, or the receiver has gone: {answer!r}")

    async def receiver_cpu(self) -> float:
        self._connection.sendall(_HEAD.pack(0, 0, False))
        return float(_CPU.unpack(self._connection.recv(_CPU.size, socket.MSG_WAITALL))[0])

    def close(self) -> None:
        self._connection.close()


def serve_socket(listener: socket.socket, memory: memoryview) -> None:
    connection, _ = listener.accept()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
    if connection.family == socket.AF_INET:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        while head := connection.recv(_HEAD.size, socket.MSG_WAITALL):
            offset, nbytes, with_checksums = _HEAD.unpack(head)
            if not nbytes:
                connection.sendall(_CPU.pack(time.process_time()))
                continue
            intact = True
            parts = block_ranges(nbytes) if with_checksums else [(0, nbytes)]
            for start, end in parts:
                target = memory[offset + start : offset + end]
                _receive(connection, target)
                if with_checksums:
                    (wanted,) = _SUM.unpack(connection.recv(_SUM.size, socket.MSG_WAITALL))
                    intact &= checksums([target])[0] == wanted
            connection.sendall(b"1" if intact else b"0")


def _receive(connection: socket.socket, target: memoryview) -> None:
    while len(target):
        target = target[connection.recv_into(target) :]


async def serve_channel(channel: Channel, region: Region) -> None:
    while True:
        asked = json.loads((await channel.recv()).header)
        if "region" in asked:
            await channel.send(region.descriptor())
        elif "cpu" in asked:
            await channel.send(repr(time.process_time()).encode())
        else:
            blocks = [
                region.memory[offset + start : offset + end]
                for offset, nbytes in asked["ranges"]
                for start, end in block_ranges(nbytes)
            ]
            found = await checksums_off_loop(blocks)
            await channel.send(b"intact" if list(found) == asked["sums"] else b"changed")


def every_transport() -> dict[str, Transport]:
    """By scheme; `curve` is zmq, encrypted."""
    options = TransportOptions(liveness_s=60.0)  # the blocking sockets hold the loop for seconds
    transports = {scheme: create_transport(scheme, options) for scheme in available_schemes() if scheme != "inproc"}
    keys = keys_of("any token of the benchmark")
    encrypted = replace(options, curve_server_secret=keys.secret, curve_server_public=keys.public)
    return transports | {"curve": create_transport("zmq", encrypted)}


async def main(folder: str, region_bytes: int, core: int, parent_pid: int) -> None:
    end_with_parent(parent_pid)
    os.sched_setaffinity(0, {core})
    transports = every_transport()
    owner = transports["shm"].create_region(region_bytes)
    page = bytes(1 << 20)
    for start in range(0, region_bytes, len(page)):
        owner.memory[start : start + len(page)] = page[: region_bytes - start]
    regions = {"shm": owner}
    for scheme, transport in transports.items():
        region = regions.setdefault(
            scheme, owner if scheme == "shm" else transport.create_region(region_bytes, owner.memory)
        )
        region.open_window(KEY, [ByteRange(0, region_bytes)])
    wanted = {"shm": f"ipc://{folder}/shm", "zmq-ipc": f"ipc://{folder}/zmq", "zmq-tcp": "tcp://127.0.0.1:0"}
    wanted["curve-tcp"] = "tcp://127.0.0.1:0"
    if "ucx" in transports:
        wanted["ucx"] = "ucx://127.0.0.1:0"
    channels = {kind: await _listen(transports, regions, kind, address) for kind, address in wanted.items()}
    sockets = {}
    for kind, family in (("socket-tcp", socket.AF_INET), ("socket-unix", socket.AF_UNIX)):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind(("127.0.0.1", 0) if family == socket.AF_INET else f"{folder}/plain")
        listener.listen(1)
        sockets[kind] = str(listener.getsockname()[1]) if family == socket.AF_INET else listener.getsockname()
        threading.Thread(target=serve_socket, args=(listener, owner.memory), daemon=True).start()
    sys.stdout.write(json.dumps(asdict(Addresses(channels, sockets))) + "\n")
    sys.stdout.flush()
    await asyncio.sleep(3600)


async def _listen(transports: dict[str, Transport], regions: dict[str, Region], kind: str, address: str) -> str:
    scheme = kind.split("-")[0]
    listener = await transports[scheme].listen(address, lambda channel: serve_channel(channel, regions[scheme]))
    return listener.address


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop_runner:
        loop_runner.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
