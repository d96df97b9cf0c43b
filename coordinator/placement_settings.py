"""What the placement half of the coordinator may be told: policies, limits and deadlines. Validated once, never changed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from coordinator.generation import Policy

NoPrefill = Literal["local", "fail"]
PrefillFailure = Literal["retry", "local", "fail"]

_CHOICES = {"policy": get_args(Policy), "no_prefill": get_args(NoPrefill), "prefill_failure": get_args(PrefillFailure)}
_POSITIVE_SECONDS = (
    "reserve_timeout_s",
    "prefill_timeout_s",
    "transfer_timeout_s",
    "decode_stall_timeout_s",
    "handoff_lease_s",
    "heartbeat_interval_s",
    "lease_s",
    "tick_s",
)
_AT_LEAST_ONE = ("max_attempts", "max_outstanding", "retry_after_s", "prefix_index_blocks")
_AT_LEAST_ZERO = ("auto_min_prefill_tokens", "max_replays")


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """
    policy: `always` sends every prompt through a prefill worker, `never` computes it on the decode worker, `auto` sends
        those of at least `auto_min_prefill_tokens` tokens that the decode worker's cache does not hold.
    no_prefill: what `always` does while no prefill worker is linked to a decode worker.
    prefill_failure: `retry` takes another prefill worker, then the decode worker; `local` the decode worker at once.
    max_attempts: prefill workers that one sequence may try in all.
    max_replays: decode workers that may fail under one sequence before it ends in an error.
    failover_wait_s: how long a sequence whose worker failed waits for another one to be there.
    decode_stall_timeout_s: a decode worker that beats but sends no token of a sequence for so long has failed it.
    handoff_lease_s: how long D and P hold a hand-off that nobody ends; longer than prefill and transfer may take.
    """

    policy: Policy = "auto"
    auto_min_prefill_tokens: int = 256
    no_prefill: NoPrefill = "local"
    prefill_failure: PrefillFailure = "retry"
    max_attempts: int = 3
    max_replays: int = 3
    failover_wait_s: float = 5.0
    reserve_timeout_s: float = 30.0
    prefill_timeout_s: float = 120.0
    transfer_timeout_s: float = 30.0
    decode_stall_timeout_s: float = 60.0
    handoff_lease_s: float = 160.0
    max_outstanding: int = 1024
    retry_after_s: int = 1
    heartbeat_interval_s: float = 0.5
    lease_s: float = 3.0
    tick_s: float = 0.1
    prefix_index_blocks: int = 65536
    model: str | None = None
    cluster_token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        for key, choices in _CHOICES.items():
            if getattr(self, key) not in choices:
                raise ValueError(f"{key}: {getattr(self, key)!r} is not one of {', '.join(choices)}")
        for key in _POSITIVE_SECONDS:
            if not (math.isfinite(getattr(self, key)) and getattr(self, key) > 0):
                raise ValueError(f"{key}: {getattr(self, key)!r} is not a positive number of seconds")
        if not (math.isfinite(self.failover_wait_s) and self.failover_wait_s >= 0):
            raise ValueError(f"failover_wait_s: {self.failover_wait_s!r} is not a number of seconds")
        for least, keys in ((1, _AT_LEAST_ONE), (0, _AT_LEAST_ZERO)):
            for key in keys:
                if getattr(self, key) < least:
                    raise ValueError(f"{key}: {getattr(self, key)!r} is less than {least}")
        if self.lease_s < 2 * self.heartbeat_interval_s:
            raise ValueError(
                f"lease_s: {self.lease_s} is less than two heartbeat intervals ({self.heartbeat_interval_s} s each)"
            )
        if self.handoff_lease_s < self.prefill_timeout_s + self.transfer_timeout_s:
            raise ValueError(
                f"handoff_lease_s: {self.handoff_lease_s} is less than prefill_timeout_s + transfer_timeout_s "
                f"({self.prefill_timeout_s + self.transfer_timeout_s})"
            )
