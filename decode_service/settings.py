"""Settings of a decode worker."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from service_kit.worker_settings import EngineSettings, ProcessSettings, WorkerSettings
from wire.control import Endpoint


class DecodeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    process: ProcessSettings = ProcessSettings()
    worker: WorkerSettings = WorkerSettings()
    engine: EngineSettings = EngineSettings()
    listen: Annotated[
        tuple[str, ...],
        Meta(description="where hand-offs come in, as transport=address, such as zmq=tcp://0.0.0.0:7000; default: loopback"),
    ] = ()
    advertise_host: Annotated[
        str, Meta(description="host name that prefill workers reach this one by; default: as listened")
    ] = ""

    def __post_init__(self) -> None:
        for text in self.listen:
            parse_listen(text)

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """`listen`, parsed."""
        return tuple(parse_listen(text) for text in self.listen)


def parse_listen(text: str) -> Endpoint:
    """
    Raises:
        ValueError: not of the form transport=address.
    """
    transport, separator, address = text.partition("=")
    if not separator or not transport or not address:
        raise ValueError(f"listen: {text!r} is not of the form transport=address")
    return Endpoint(transport=transport, address=address)
