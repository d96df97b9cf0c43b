"""What goes into the life of a sequence and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.generation import GenerationError
from coordinator.routing import NoRoute, PrefillChoice, Route
from wire.control import Cancel, FailureKind, FirstToken, Generate, HandoffTicket, Prefill, Reserve, TokenDelta
from wire.ids import Incarnation, RequestId
from wire.sequence import FinishReason, SampledToken

# -- events: the answers of routing, the messages of workers, and the rest ---------------------------------------------


@dataclass(frozen=True, slots=True)
class Routed:
    route: Route


@dataclass(frozen=True, slots=True)
class NotRouted:
    why: NoRoute


@dataclass(frozen=True, slots=True)
class Granted:
    """`Reserved` from D, and the prefill worker that routing picked for it."""

    worker: Incarnation
    ticket: HandoffTicket
    prefill: PrefillChoice


@dataclass(frozen=True, slots=True)
class FirstDrawn:
    worker: Incarnation
    message: FirstToken


@dataclass(frozen=True, slots=True)
class Drawn:
    worker: Incarnation
    delta: TokenDelta


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """`RequestFailed`: the worker holds nothing more for this attempt."""

    worker: Incarnation
    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True)
class WorkerBroke:
    """The worker sent what the protocol does not allow here; it may still hold something."""

    worker: Incarnation
    message: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    worker: Incarnation
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed, or the cluster has changed."""


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """The client wants no more."""


@dataclass(frozen=True, slots=True)
class ShutDown:
    """The coordinator stops."""


WorkerEvent = Granted | FirstDrawn | Drawn | AttemptFailed | WorkerBroke
Event = Routed | NotRouted | WorkerEvent | WorkerLost | Tick | CancelAsked | ShutDown

# -- actions ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskRoute:
    """Answer with `Routed` or `NotRouted`."""


@dataclass(frozen=True, slots=True)
class BeginAttempt:
    """Messages that name this id are this life's."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class EndAttempt:
    """Messages that name this id are late from now on; its workers (named) have nothing more to do for it."""

    request_id: RequestId
    workers: tuple[Incarnation, ...]


@dataclass(frozen=True, slots=True)
class Send:
    worker: Incarnation
    message: Reserve | Generate | Prefill | Cancel


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The prefill worker has computed this attempt's prompt; at most the hand-off is left."""

    worker: Incarnation
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Emit:
    tokens: tuple[SampledToken, ...]
    finish: FinishReason | None
    prompt: tuple[SampledToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Fail:
    error: GenerationError


@dataclass(frozen=True, slots=True)
class Note:
    """Something to count: a route taken, a fallback, a failure, a replay."""

    what: str


Action = AskRoute | BeginAttempt | EndAttempt | Send | PrefillDone | Emit | Fail | Note
