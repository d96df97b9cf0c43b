"""Tells whoever started this process how far it is, by systemd's protocol (`sd_notify(3)`).

The starter names a datagram socket in NOTIFY_SOCKET: `kvrelay up` does, and so does systemd for `Type=notify` units. Without
the variable nothing is sent.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

NOTIFY_VARIABLE = "NOTIFY_SOCKET"
READY = "READY=1"
STOPPING = "STOPPING=1"


def notify(state: str, environ: Mapping[str, str] = os.environ) -> None:
    """Send `state` and this process' id. A starter that is gone is no error."""
    address = environ.get(NOTIFY_VARIABLE)
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]  # Linux' abstract names
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.setblocking(False)
        try:
            sender.sendto(f"{state}\nMAINPID={os.getpid()}".encode(), address)
        except (ConnectionRefusedError, FileNotFoundError, BlockingIOError):
            return


def parse_notification(data: bytes) -> dict[str, str]:
    """The `NAME=value` lines of one datagram; lines of another form are left out."""
    lines = (line.partition("=") for line in data.decode(errors="replace").splitlines())
    return {name: value for name, separator, value in lines if separator}
