"""Transports by scheme."""

from __future__ import annotations

from collections.abc import Callable

from transport.base import Transport
from transport.errors import AddressError
from transport.inproc import InprocTransport
from transport.inproc_hub import InprocHub
from transport.options import TransportOptions
from transport.shm import ShmTransport
from transport.ucx import is_installed as ucx_is_installed
from transport.ucx_transport import UcxTransport
from transport.zmq_transport import ZmqTransport


def _make_inproc(options: TransportOptions) -> Transport:
    return InprocTransport(options.inproc_hub or InprocHub(), options)


def _factories() -> dict[str, Callable[[TransportOptions], Transport]]:
    return {"inproc": _make_inproc, "shm": ShmTransport, "ucx": UcxTransport, "zmq": ZmqTransport}


def available_schemes() -> tuple[str, ...]:
    """Those that can be made here: `ucx` needs the extra of its name."""
    return tuple(sorted(scheme for scheme in _factories() if scheme != "ucx" or ucx_is_installed()))


def create_transport(scheme: str, options: TransportOptions) -> Transport:
    """
    Raises:
        AddressError: no transport has this scheme; names those that there are.
        TransportError: what it needs is not installed.
    """
    factory = _factories().get(scheme)
    if factory is None:
        raise AddressError(f"unknown transport {scheme!r}; there are {', '.join(available_schemes())}")
    return factory(options)
