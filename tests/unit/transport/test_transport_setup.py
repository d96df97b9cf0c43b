"""Options, addresses, the registry."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from transport.addresses import IpcAddress, TcpAddress, claim_ipc_path, parse_address, resolve
from transport.errors import AddressError
from transport.inproc import InprocTransport
from transport.inproc_hub import InprocHub
from transport.options import TransportOptions
from transport.registry import available_schemes, create_transport


@pytest.mark.parametrize(
    "bad",
    [
        {"max_in_flight_bytes": 4095},
        {"max_message_bytes": 0},
        {"max_message_bytes": 10_000, "max_in_flight_bytes": 9_000},
        {"liveness_s": 0.0},
        {"liveness_s": float("nan")},
        {"io_threads": 0},
        {"curve_server_secret": b"short"},
        {"curve_server_public": b"x" * 41},
    ],
)
def test_options_name_the_bad_field(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        TransportOptions(**bad)  # type: ignore[arg-type]


def test_options_hide_the_secret() -> None:
    assert "S" * 40 not in repr(TransportOptions(curve_server_secret=b"S" * 40))


async def test_registry() -> None:
    hub = InprocHub()
    assert set(available_schemes()) - {"ucx"} == {"inproc", "shm", "zmq"}
    for scheme in available_schemes():
        transport = create_transport(scheme, TransportOptions(inproc_hub=hub))
        assert transport.scheme == scheme
        if isinstance(transport, InprocTransport):
            assert transport.hub is hub
        await transport.close()
    with pytest.raises(AddressError, match=r"carrier-pigeon.*inproc, shm, (ucx, )?zmq"):
        create_transport("carrier-pigeon", TransportOptions())
    assert len(hub.listeners) == 0


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://127.0.0.1:80", TcpAddress("127.0.0.1", 80)),
        ("tcp://worker-1.cluster.local:65535", TcpAddress("worker-1.cluster.local", 65535)),
        ("tcp://[::1]:5", TcpAddress("::1", 5)),
        ("tcp://*:0", TcpAddress("*", 0)),
        ("ipc:///a/b", IpcAddress("/a/b")),
        ("ipc://b", IpcAddress("b")),
    ],
)
def test_addresses(text: str, address: TcpAddress | IpcAddress) -> None:
    assert parse_address(text) == address
    assert address.text == text


@pytest.mark.parametrize(
    "text", ["tcp://:1", "tcp://a:1/x", "tcp://[zz]:1", "tcp://[1:2]:1", "ipc://@abstract", "ipc://a\0b", "udp://a:1"]
)
def test_malformed_addresses_say_so(text: str) -> None:
    with pytest.raises(AddressError):
        parse_address(text)


def test_the_longest_ipc_path() -> None:
    parse_address("ipc://" + "x" * 107)
    with pytest.raises(AddressError, match="107"):
        parse_address("ipc://" + "x" * 108)


async def test_names_are_resolved() -> None:
    assert await resolve(TcpAddress("localhost", 7)) == TcpAddress("127.0.0.1", 7)
    assert await resolve(TcpAddress("*", 7)) == TcpAddress("*", 7)
    with pytest.raises(socket.gaierror):
        await asyncio.wait_for(resolve(TcpAddress("no-such-host.invalid", 7)), 10)


def test_ipc_paths_are_claimed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    address = IpcAddress(str(path))
    claim_ipc_path(address)
    # 1. A file that is no socket is never removed.
    path.write_text("precious")
    with pytest.raises(AddressError, match="not a socket"):
        claim_ipc_path(address)
    path.unlink()
    # 2. A socket that someone listens on is in use; left behind, it is removed.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(AddressError, match="in use"):
            claim_ipc_path(address)
    claim_ipc_path(address)
    assert not path.exists()
    # 3. Its folder must be there.
    with pytest.raises(AddressError, match="does not exist"):
        claim_ipc_path(IpcAddress(str(tmp_path / "no" / "s")))
