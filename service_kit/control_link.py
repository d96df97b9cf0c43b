"""A worker's link to its coordinator: dial, register, heartbeat, and again when the link is lost.

Liveness (zguide's paranoid pirate): a heartbeat every interval, any message counts as life, silence for the lease ends the
link. A link that ended, for whatever reason, ends everything that the worker held for that coordinator: `on_lost` cancels
it, and the worker registers anew, with the same coordinator or its successor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from service_kit.backoff import Backoff
from service_kit.outbox import Outbox, run_together
from transport.base import Channel, Transport
from transport.errors import TransportError
from wire.codec import coordinator_codec
from wire.control import (
    CoordinatorMessage,
    Heartbeat,
    HeartbeatAck,
    Refused,
    Register,
    Welcome,
    WorkerInfo,
    WorkerLoad,
    WorkerMessage,
)
from wire.errors import DecodeError
from wire.kv_layout import PROTOCOL_VERSION

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 3.0


class ControlHandler(Protocol):
    """What a service does with its coordinator's messages. Called on the event loop; must not block."""

    def on_registered(self) -> None: ...

    def on_message(self, message: CoordinatorMessage) -> None: ...

    def on_coordinator_lost(self) -> None:
        """Cancel everything that the coordinator asked for."""


class RegistrationRefused(Exception):
    """The coordinator will never take this worker (other model, layout, protocol or token)."""


class ControlLink:
    """Keeps one worker registered. `run` returns only after `leave`, or by cancellation or `RegistrationRefused`."""

    def __init__(
        self,
        transport: Transport,
        address: str,
        info: WorkerInfo,
        token: str,
        load: Callable[[], WorkerLoad],
        handler: ControlHandler,
    ) -> None:
        self._transport = transport
        self._address = address
        self._info = info
        self._token = token
        self._load = load
        self._handler = handler
        self._codec = coordinator_codec()
        self._outbox: Outbox | None = None
        self._channel: Channel | None = None
        self._left = False
        self.registered = False

    def post(self, message: WorkerMessage) -> None:
        """Send in order, without waiting; dropped while no coordinator is there (it has forgotten the request)."""
        if self._outbox is not None:
            self._outbox.post(message)

    async def leave(self, goodbye: WorkerMessage) -> None:
        """Send everything posted and `goodbye`, close the channel, and stay away: `run` returns."""
        self._left = True
        if self._outbox is not None and self._channel is not None:
            self._outbox.post(goodbye)
            await self._outbox.flush()
            await self._channel.close()

    async def run(self, on_registered: Callable[[], object] = lambda: None) -> None:
        """
        Args:
            on_registered: called at each registration, before the handler hears of it.

        Raises:
            RegistrationRefused: for good.
        """
        backoff = Backoff()
        while not self._left:
            try:
                await self._session(backoff, on_registered)
            except (TransportError, DecodeError, TimeoutError) as error:
                if not self._left:
                    log.warning("coordinator %s: %s", self._address, error or type(error).__name__)
            await asyncio.sleep(backoff.next_delay())

    async def _session(self, backoff: Backoff, on_registered: Callable[[], object]) -> None:
        """One registration, until the link ends."""
        now = asyncio.get_running_loop().time()
        channel = await self._transport.connect(self._address, now + CONNECT_TIMEOUT_S)
        try:
            welcome = await self._register(channel)
            if welcome is None:
                return
            backoff.reset()
            log.info("registered with coordinator %s at %s", welcome.coordinator, self._address)
            self._channel = channel
            self._outbox = outbox = Outbox(channel)
            self.registered = True
            on_registered()
            self._handler.on_registered()
            try:
                await run_together(
                    outbox.run(),
                    self._beat(outbox, welcome.heartbeat_interval_s),
                    self._receive(channel, welcome.lease_s),
                )
            finally:
                self.registered = False
                self._outbox = self._channel = None
                self._handler.on_coordinator_lost()
        finally:
            if not self._left:  # else `leave` is closing it
                channel.abort()

    async def _register(self, channel: Channel) -> Welcome | None:
        await channel.send(self._codec.encode(Register(PROTOCOL_VERSION, self._info, self._token)))
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            answer = self._codec.decode((await channel.recv()).header)
        match answer:
            case Welcome():
                return answer
            case Refused(reason=reason, retry=False):
                raise RegistrationRefused(reason)
            case Refused(reason=reason):
                log.warning("coordinator asks to register later: %s", reason)
                return None
            case _:
                raise DecodeError(f"expected welcome or refused, got {type(answer).__name__}")

    async def _beat(self, outbox: Outbox, interval_s: float) -> None:
        while True:
            outbox.post(Heartbeat(self._info.incarnation, self._load()))
            await asyncio.sleep(interval_s)

    async def _receive(self, channel: Channel, lease_s: float) -> None:
        while True:
            async with asyncio.timeout(lease_s):
                message = self._codec.decode((await channel.recv()).header)
            if not isinstance(message, HeartbeatAck):
                self._handler.on_message(message)
