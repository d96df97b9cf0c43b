"""What the coordinator does when a worker fails or is slow; every rule a setting, never a silent choice."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PositiveSeconds = Annotated[float, Meta(gt=0)]


class FailureSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    no_prefill: Annotated[
        Literal["local", "fail"], Meta(description="policy always without a linked prefill worker: decode worker, or 503")
    ] = "local"
    prefill_failure: Annotated[
        Literal["retry", "local", "fail"],
        Meta(description="a prefill worker failed: another one, then the decode worker; the decode worker; or 503"),
    ] = "retry"
    max_attempts: Annotated[int, Meta(ge=1, description="prefill workers that one sequence may try")] = 3
    max_replays: Annotated[int, Meta(ge=0, description="decode workers that may fail under one sequence")] = 3
    failover_wait_s: Annotated[
        float, Meta(ge=0, description="seconds that a sequence whose worker failed waits for another one")
    ] = 5.0
    reserve_timeout_s: Annotated[PositiveSeconds, Meta(description="seconds until a decode worker must have room")] = 30.0
    prefill_timeout_s: Annotated[PositiveSeconds, Meta(description="seconds until a prefill worker's first token")] = 120.0
    transfer_timeout_s: Annotated[PositiveSeconds, Meta(description="seconds from there to the first of decode")] = 30.0
    decode_stall_timeout_s: Annotated[
        PositiveSeconds, Meta(description="seconds without a token of a sequence until its decode worker has failed it")
    ] = 60.0
    handoff_lease_s: Annotated[
        PositiveSeconds, Meta(description="seconds that workers hold a hand-off nobody ends; at least prefill + transfer")
    ] = 160.0
    heartbeat_interval_s: Annotated[PositiveSeconds, Meta(description="seconds between a worker's heartbeats")] = 0.5
    lease_s: Annotated[PositiveSeconds, Meta(description="seconds of silence after which a worker is lost")] = 3.0
