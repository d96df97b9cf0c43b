"""The contract of every transport: move bytes, know nothing of what they mean.

Two verbs:

1. An ordered **message channel**: `send(header, buffers)` / `recv(allocate)`. The receiver provides the memory for the
   buffers from their sizes, which arrive first.
2. **Bulk placement** into a region that the receiver has registered: `remote.put(key, writes)`. The owner opens a window
   (byte ranges under an unguessable key) before anyone may write, and closes it when nobody may any more.

Rules that every implementation keeps, and `tests/contract` checks:

- One reader task per channel at a time. Sends of several tasks go one after the other in the order of their calls, and so do
  puts into the same place; a message may overtake a put that was called before it. Messages arrive whole, once, in order.
- When `put` returns, the source buffers may be reused. A message sent on the same channel after `put` returned is received
  after the bytes are in place.
- A write outside an open window of its key writes nothing at all and raises `PlacementRefused`, on the side that first
  can know. Bounds are checked before a byte is written.
- `send` and `put` wait when the peer does not keep up: what is on its way is bounded (`max_in_flight_bytes`).
- Every await may be cancelled. Cancelled in the middle of a send or put, the channel is aborted: half a message cannot be
  taken back. Cancelled while it still waits for its turn, it has not happened.
- `close` flushes what was sent and ends; `abort` drops it. Both may be called twice. Afterwards everything raises
  `ChannelClosed`, on both sides; a peer that died is noticed within `liveness_s`.
- Deadlines are moments of `asyncio.get_running_loop().time()`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

Buffer = bytes | bytearray | memoryview
Allocate = Callable[[tuple[int, ...]], Sequence[memoryview]]
"""Given the sizes of a message's buffers, returns writable memory of exactly these sizes."""


@dataclass(frozen=True, slots=True)
class Message:
    header: bytes
    buffers: tuple[memoryview, ...] = ()


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`[offset, offset + nbytes)` of a region."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes to place at an offset of a remote region."""

    offset: int
    source: Buffer


class Region(ABC):
    """Memory of this process that peers may be allowed to write into. Owned by whoever created it, who closes it."""

    receiver_copies: bool
    """True: this process does the copying (or posts every receive, and takes it back), so `close_window` alone ends every
    write, and so does the end of the channel here. False: peers write by themselves, so after `close_window` the owner
    must still hear from the writer (or know it dead) before it reuses the memory. Such a writer writes nothing more once its
    put has returned or raised."""

    @property
    @abstractmethod
    def memory(self) -> memoryview:
        """Writable, page-aligned, zero at first."""

    @abstractmethod
    def descriptor(self) -> bytes:
        """What a peer needs to reach this region through a channel of the same transport; opaque to everyone else."""

    @abstractmethod
    def open_window(self, key: int, ranges: Sequence[ByteRange]) -> None:
        """Let holders of `key` write into `ranges`.

        Raises:
            ValueError: the key is in use, or a range lies outside the region.
        """

    @abstractmethod
    def close_window(self, key: int) -> None:
        """Refuse writes under `key` from now on; unknown keys are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. No window may be in use; views of `memory` must be gone."""


class RemoteRegion(ABC):
    """A peer's region, seen through one channel; ends with the channel."""

    nbytes: int

    @property
    def path(self) -> str:
        """What the bytes travel by, such as `tcp/eth0`, where the transport chose that by itself; else nothing."""
        return ""

    @abstractmethod
    async def put(self, key: int, writes: Sequence[Write]) -> None:
        """Place bytes. Adjacent writes may be coalesced."""


class Channel(ABC):
    """One connection between two processes."""

    local: str
    peer: str

    @abstractmethod
    async def send(self, header: bytes, buffers: Sequence[Buffer] = ()) -> None: ...

    @abstractmethod
    async def recv(self, allocate: Allocate | None = None) -> Message:
        """The next message. Without `allocate`, buffers come in fresh memory."""

    @abstractmethod
    async def open_region(self, descriptor: bytes) -> RemoteRegion:
        """
        Raises:
            TransportError: the descriptor is not one of this transport's, or the region cannot be reached.
        """

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def abort(self) -> None: ...


OnChannel = Callable[[Channel], Awaitable[None]]
"""Called in a task of its own for each accepted channel; the channel is aborted when it returns or raises."""


class Listener(ABC):
    """Accepts channels until closed."""

    address: str
    """Where peers connect to; differs from the address that was asked for when that left the port open (`:0`)."""

    @abstractmethod
    async def close(self) -> None:
        """Stop accepting and abort the channels that were accepted."""


class Transport(ABC):
    """One process' end of a kind of connection; owns sockets and regions, which `close` ends."""

    scheme: str

    owns_memory: bool
    """True: regions are memory that this transport makes (a shared segment). False: any memory of the process will do."""

    @abstractmethod
    def create_region(self, nbytes: int, memory: memoryview | None = None) -> Region:
        """Register memory for peers to write into: new memory, or `memory` (`nbytes` long; still the caller's afterwards),
        so that several transports can offer the same bytes.

        Raises:
            ValueError: `memory` was given and this transport makes its own, or its size is not `nbytes`.
        """

    @abstractmethod
    async def listen(self, address: str, on_channel: OnChannel) -> Listener:
        """
        Raises:
            AddressError: malformed, or in use.
        """

    @abstractmethod
    async def connect(self, address: str, deadline: float) -> Channel:
        """
        Raises:
            AddressError: malformed.
            ConnectTimeout: nobody answered before `deadline`.
        """

    @abstractmethod
    async def close(self) -> None: ...
