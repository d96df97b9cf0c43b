"""What a process decides about its transports, validated once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from transport.inproc_hub import InprocHub

MAX_HEADER_BYTES = 16 << 20
_Z85_KEY_CHARS = 40


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """Limits and keys. Both ends of a channel tell each other theirs and keep to the smaller one.

    Raises:
        ValueError: names the field that is out of range.
    """

    max_in_flight_bytes: int = 64 << 20
    """Per channel and direction: bytes sent that the peer's application has not consumed yet."""
    max_message_bytes: int = 64 << 20
    """Header and buffers of one message; larger data goes by `put`."""
    liveness_s: float = 3.0
    """A peer that was silent for so long is dead."""
    io_threads: int = 1
    """Threads in which ZeroMQ moves bytes, per transport."""
    curve_server_secret: bytes | None = field(default=None, repr=False)
    """Listeners on tcp:// demand CURVE and own this secret key (Z85, 40 characters)."""
    curve_server_public: bytes | None = None
    """Channels to tcp:// encrypt, and accept only a listener that owns the secret of this public key (Z85)."""
    inproc_hub: InprocHub | None = None
    """Where inproc:// names live; a transport without one makes its own."""

    def __post_init__(self) -> None:
        if self.max_in_flight_bytes < 4096:
            raise ValueError(f"max_in_flight_bytes must be at least 4096, not {self.max_in_flight_bytes}")
        if not 1 <= self.max_message_bytes <= self.max_in_flight_bytes:
            raise ValueError(
                f"max_message_bytes must lie in 1..max_in_flight_bytes = {self.max_in_flight_bytes}, "
                f"not {self.max_message_bytes}"
            )
        if not (math.isfinite(self.liveness_s) and self.liveness_s > 0):
            raise ValueError(f"liveness_s must be a positive number, not {self.liveness_s}")
        if self.io_threads < 1:
            raise ValueError(f"io_threads must be at least 1, not {self.io_threads}")
        for name in ("curve_server_secret", "curve_server_public"):
            key = getattr(self, name)
            if key is not None and len(key) != _Z85_KEY_CHARS:
                raise ValueError(f"{name} must be a Z85 key of {_Z85_KEY_CHARS} characters")
