"""When requests arrive: moments in seconds from the start of a run, drawn before it begins.

All open-loop processes are scaled by a load factor; `Closed` has no arrival times, its next request follows an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

Rate = Annotated[float, Meta(gt=0, description="requests per second at load 1")]


class Poisson(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="process", tag="poisson"):
    rate: Rate


class Gamma(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="process", tag="gamma"):
    """Independent gamma-distributed gaps. `burstiness` is their shape: below 1 bursty, 1 Poisson, above 1 regular; their
    squared coefficient of variation is 1 / burstiness."""

    rate: Rate
    burstiness: Annotated[float, Meta(gt=0)]


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="process", tag="constant"):
    """Equal gaps; the first request after `offset` of one gap (0 … 1)."""

    rate: Rate
    offset: Annotated[float, Meta(ge=0, le=1)] = 0.5


class Ramp(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="process", tag="ramp"):
    """Poisson with a rate that goes linearly from `start_rate` to `end_rate` over the run."""

    start_rate: Annotated[float, Meta(ge=0)]
    end_rate: Rate


class Closed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="process", tag="closed"):
    """`concurrency` clients, each of which sends its next request when the last one was answered."""

    concurrency: Annotated[int, Meta(ge=1, le=4096)]


class Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="process", tag="trace"):
    """The arrival times, lengths and shared prefixes of a public trace (`benchmarks.workloads.traces`)."""

    file: str
    time_scale: Annotated[float, Meta(gt=0, description="a gap of the trace lasts this many times as long")] = 1.0
    prompt_scale: Annotated[float, Meta(gt=0)] = 1.0
    output_scale: Annotated[float, Meta(gt=0)] = 1.0
    max_prompt_tokens: Annotated[int, Meta(ge=1)] = 1_000_000
    max_output_tokens: Annotated[int, Meta(ge=1)] = 1_000_000
    skip_s: Annotated[float, Meta(ge=0, description="begin this far into the trace, in its own time")] = 0.0


OpenLoop = Poisson | Gamma | Constant | Ramp
Arrivals = OpenLoop | Closed | Trace


def arrival_times(arrivals: OpenLoop, load: float, duration_s: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Increasing moments in [0, duration_s), float64 [count].

    Args:
        load: factor on every rate.
    """
    match arrivals:
        case Poisson(rate=rate):
            return _renewal(lambda count: rng.exponential(1 / (rate * load), count), duration_s)
        case Gamma(rate=rate, burstiness=shape):
            scale = 1 / (rate * load * shape)
            return _renewal(lambda count: rng.gamma(shape, scale, count), duration_s)
        case Constant(rate=rate, offset=offset):
            gap = 1 / (rate * load)
            times = (np.arange(int(duration_s / gap) + 2, dtype=np.float64) + offset) * gap
            kept: NDArray[np.float64] = times[times < duration_s]
            return kept
        case Ramp(start_rate=start, end_rate=end):
            return _ramp(start * load, end * load, duration_s, rng)


def mean_rate(arrivals: OpenLoop) -> float:
    """Requests per second at load 1, over a whole run."""
    return (arrivals.start_rate + arrivals.end_rate) / 2 if isinstance(arrivals, Ramp) else arrivals.rate


def _renewal(draw_gaps: Callable[[int], NDArray[np.float64]], duration_s: float) -> NDArray[np.float64]:
    """Gaps are drawn in pieces until they reach the end, so that the same seed gives the same beginning whatever the end."""
    piece = 64
    times = np.cumsum(draw_gaps(piece))
    while times[-1] < duration_s:
        times = np.concatenate([times, times[-1] + np.cumsum(draw_gaps(piece))])
    return times[times < duration_s]


def _ramp(start: float, end: float, duration_s: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Thinning (Lewis and Shedler 1979): a Poisson process of the highest rate, each point kept with rate(t) / highest."""
    highest = max(start, end)
    times = _renewal(lambda count: rng.exponential(1 / highest, count), duration_s)
    kept = rng.random(len(times)) * highest < start + (end - start) * times / duration_s
    return times[kept]
