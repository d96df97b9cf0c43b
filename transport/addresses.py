"""Addresses of the ZeroMQ channels: `tcp://host:port` and `ipc://path`."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import re
import socket
import stat
from dataclasses import dataclass

from transport.errors import AddressError

_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+|\*):([0-9]{1,5})")
_IPC_PATH_MAX_BYTES = 107  # sizeof(sockaddr_un.sun_path) - 1


@dataclass(frozen=True, slots=True)
class TcpAddress:
    host: str  # without brackets; "*" for every interface
    port: int  # 0 only when listening: any free one

    @property
    def text(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class IpcAddress:
    path: str

    @property
    def text(self) -> str:
        return f"ipc://{self.path}"


def parse_address(address: str) -> TcpAddress | IpcAddress:
    """
    Raises:
        AddressError: malformed.
    """
    if address.startswith("ipc://"):
        path = address[len("ipc://") :]
        if not path or path.startswith("@") or "\0" in path:
            raise AddressError(f"address {address!r} needs a file path behind ipc://")
        if len(os.fsencode(path)) > _IPC_PATH_MAX_BYTES:
            raise AddressError(f"the path of {address!r} is longer than {_IPC_PATH_MAX_BYTES} bytes")
        return IpcAddress(path)
    match = _TCP.fullmatch(address)
    if match is None:
        raise AddressError(f"address {address!r} is neither tcp://host:port nor ipc://path")
    host, port = match.group(1).strip("[]"), int(match.group(2))
    if port > 65535:
        raise AddressError(f"port {port} of {address!r} is above 65535")
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
        except ValueError as error:
            raise AddressError(f"host of {address!r} is not an IPv6 address") from error
    return TcpAddress(host, port)


async def resolve(address: TcpAddress) -> TcpAddress:
    """With a number for a host name.

    Raises:
        OSError: the name has no address at present.
    """
    if address.host == "*":
        return address
    found = await asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return TcpAddress(str(found[0][4][0]), address.port)


def claim_ipc_path(address: IpcAddress) -> None:
    """Removes the socket file of a listener that has died; ZeroMQ itself would take over one in use.

    Raises:
        AddressError: the folder is missing, or the path is in use.
    """
    folder = os.path.dirname(address.path) or "."
    if not os.path.isdir(folder):
        raise AddressError(f"{address.text}: folder {folder} does not exist")
    try:
        mode = os.lstat(address.path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise AddressError(f"{address.text}: the path exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address.path)
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(address.path)
            return
        except OSError as error:
            raise AddressError(f"{address.text} is in use or not accessible: {error}") from error
    raise AddressError(f"{address.text} is in use")


class SocketFile:
    """The file of an ipc:// listener, which ZeroMQ leaves behind when it closes."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._inode = os.lstat(path).st_ino

    def remove(self) -> None:
        """Unlinks it, unless a successor has put its own there."""
        with contextlib.suppress(FileNotFoundError):
            if os.lstat(self._path).st_ino == self._inode:
                os.unlink(self._path)
