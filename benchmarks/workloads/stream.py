"""What one kind of traffic looks like, as an experiment's file describes it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from benchmarks.workloads.arrivals import Arrivals, Closed, Ramp, Trace, mean_rate
from benchmarks.workloads.lengths import Fixed, Lengths

Share = Annotated[float, Meta(ge=0, le=1)]


class SharedPrefix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `share` of the requests begins with one of `groups` prefixes of `tokens` tokens, which lengthen the prompt."""

    share: Share
    tokens: Annotated[int, Meta(ge=1)]
    groups: Annotated[int, Meta(ge=1)] = 1


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request meets it when its TTFT and its TPOT are both at most that long."""

    ttft_ms: Annotated[float, Meta(gt=0)]
    tpot_ms: Annotated[float, Meta(gt=0)]


class Stream(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"^[a-z0-9-]+$")] = "requests"
    arrivals: Arrivals = Closed(1)
    prompt: Lengths = Fixed(128)
    output: Lengths = Fixed(32)
    shared_prefix: SharedPrefix | None = None
    turns: Annotated[int, Meta(ge=1, le=64, description="requests of a conversation; each holds all before it")] = 1
    think_s: Annotated[float, Meta(ge=0, description="mean pause before the next turn; exponential")] = 0.0
    cancel_rate: Annotated[Share, Meta(description="share of requests that the client gives up")] = 0.0
    cancel_after_s: Annotated[float, Meta(gt=0, description="mean time after which it does; exponential")] = 1.0
    scales: Annotated[bool, Meta(description="the load of a point multiplies its rate")] = True
    judged: Annotated[bool, Meta(description="its requests count for latency, attainment and goodput")] = True
    slo: Annotated[Slo | None, Meta(description="in place of the experiment's")] = None

    def __post_init__(self) -> None:
        if self.turns > 1 and isinstance(self.arrivals, Trace):
            raise ValueError("turns: a trace says itself what is shared")

    def rate_at(self, load: float) -> float | None:
        """Requests (or conversations) per second; None where the trace or the answers decide."""
        if isinstance(self.arrivals, Closed | Trace):
            return None
        return mean_rate(self.arrivals) * self.load_of(load)

    def load_of(self, load: float) -> float:
        return load if self.scales else 1.0

    @property
    def is_ramp(self) -> bool:
        return isinstance(self.arrivals, Ramp)
