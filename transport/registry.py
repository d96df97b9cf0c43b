"""Transports by scheme."""

from __future__ import annotations

from collections.abc import Callable

from transport.base import Transport
from transport.errors import AddressError
from transport.inproc import InprocTransport
from transport.inproc_hub import InprocHub
from transport.options import TransportOptions
from transport.shm import ShmTransport
from transport.zmq_transport import ZmqTransport


def _make_inproc(options: TransportOptions) -> Transport:
    return InprocTransport(options.inproc_hub or InprocHub(), options)


def _factories() -> dict[str, Callable[[TransportOptions], Transport]]:
    return {"inproc": _make_inproc, "shm": ShmTransport, "zmq": ZmqTransport}


def available_schemes() -> tuple[str, ...]:
    return tuple(sorted(_factories()))


def create_transport(scheme: str, options: TransportOptions) -> Transport:
    """
    Raises:
        AddressError: no transport has this scheme; names those that there are.
    """
    factory = _factories().get(scheme)
    if factory is None:
        raise AddressError(f"unknown transport {scheme!r}; there are {', '.join(available_schemes())}")
    return factory(options)
