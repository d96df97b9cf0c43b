"""The coordinator's end of the control channels: accepts workers, decodes what they say, writes what they are told.

    channel ─▶ Register within a deadline ─▶ handler.register ─▶ refused: Refused, close
                                                              └▶ taken: one reader, one writer, until either ends

It knows the wire and nothing of what the messages mean: that is the handler's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import Protocol

from transport.base import Channel, Listener, Transport
from transport.errors import TransportError
from wire.codec import Codec, worker_codec
from wire.control import CoordinatorMessage, Register, WorkerMessage
from wire.errors import DecodeError

_log = logging.getLogger("kvrelay.coordinator.hub")

MAX_UNSENT = 65536
"""Messages to one worker. One that does not read so many is as good as gone."""


class Session(Protocol):
    """One worker's channel, as the handler sees it."""

    def send(self, message: CoordinatorMessage) -> None:
        """Queue a message; never waits. On a channel that has ended it does nothing: `closed` tells, or told."""

    def abort(self) -> None:
        """End the channel now; idempotent."""


class SessionHandler(Protocol):
    def register(self, message: Register, session: Session) -> bool:
        """Welcome the worker, or send `Refused` and return false: what was sent is flushed and the channel closed."""

    def received(self, message: WorkerMessage, session: Session) -> None: ...

    def closed(self, session: Session, reason: str) -> None:
        """Called once for each session that was taken, also after `abort`."""


class ChannelSession:
    def __init__(self, channel: Channel, codec: Codec[WorkerMessage]) -> None:
        self._channel = channel
        self._codec = codec
        self._unsent: deque[CoordinatorMessage] = deque()
        self._wake = asyncio.Event()
        self._ended = False
        self.why_aborted: str | None = None

    def send(self, message: CoordinatorMessage) -> None:
        if self._ended:
            return
        if len(self._unsent) >= MAX_UNSENT:
            self.why_aborted = f"did not read {MAX_UNSENT} messages"
            self.abort()
            return
        self._unsent.append(message)
        self._wake.set()

    def abort(self) -> None:
        if not self._ended:
            self._ended = True
            self._unsent.clear()
            self._channel.abort()

    def end(self) -> None:
        self._ended = True

    async def write(self) -> None:
        """Send what is queued, in order, for ever."""
        while True:
            await self.flush()
            self._wake.clear()
            await self._wake.wait()

    async def flush(self) -> None:
        while self._unsent:
            await self._channel.send(self._codec.encode(self._unsent.popleft()))


class ControlHub:
    """Owns the listener and the channels that it accepted, not the transport."""

    def __init__(self, transport: Transport, handler: SessionHandler, handshake_timeout_s: float = 5.0) -> None:
        self._transport = transport
        self._handler = handler
        self._handshake_timeout_s = handshake_timeout_s
        self._codec = worker_codec()
        self._listener: Listener | None = None

    async def listen(self, address: str) -> str:
        """Accept workers; returns where they connect to.

        Raises:
            AddressError: malformed, or in use.
        """
        self._listener = await self._transport.listen(address, self._serve)
        return self._listener.address

    async def close(self) -> None:
        """Stop accepting, and abort all channels; each is reported to the handler as closed."""
        if self._listener is not None:
            await self._listener.close()
            self._listener = None

    async def _serve(self, channel: Channel) -> None:
        session = ChannelSession(channel, self._codec)
        try:
            async with asyncio.timeout(self._handshake_timeout_s):
                first = await self._receive(channel)
                if not isinstance(first, Register):
                    _log.warning("%s: sent %s before it registered", channel.peer, type(first).__name__)
                    return
                taken = self._handler.register(first, session)
                if not taken:
                    await session.flush()
                    await channel.close()
                    return
        except (TimeoutError, TransportError, DecodeError) as error:
            _log.warning("%s: did not register: %s", channel.peer, error or "no message in time")
            return
        await self._talk(channel, session)

    async def _talk(self, channel: Channel, session: ChannelSession) -> None:
        writer = asyncio.create_task(self._write(channel, session))
        reason = "its channel ended"
        try:
            while True:
                self._handler.received(await self._receive(channel), session)
        except TransportError as error:
            reason = session.why_aborted or f"its channel ended: {error}"
        except DecodeError as error:
            reason = f"sent what is no message: {error}"
            _log.warning("%s: %s", channel.peer, reason)
        finally:
            session.end()
            writer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writer
            self._handler.closed(session, reason)

    async def _write(self, channel: Channel, session: ChannelSession) -> None:
        try:
            await session.write()
        except TransportError as error:
            _log.info("%s: cannot be written to: %s", channel.peer, error)
            session.abort()  # wakes the reader

    async def _receive(self, channel: Channel) -> WorkerMessage:
        message = await channel.recv()
        if message.buffers:
            raise DecodeError("a control message carries no buffers")
        return self._codec.decode(message.header)
