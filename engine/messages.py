"""What goes into the engine and what comes out: frozen values, the only things that cross its thread's border.

    service (asyncio) ── EngineCommand ─▶ EngineCore ── EngineEvent ─▶ service

Block ownership: the engine owns every block. `Reserved` and `BlocksComputed` lend blocks: a lent block is not reused until
the service says `Fill`, `Release` or `Abort` for that sequence, so a service must not abort a reservation while a writer may
still write into it.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from wire.ids import BlockId, RequestId
from wire.sequence import FinishReason, SampledToken, SequenceSpec

# -- commands -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Add:
    """Compute and decode a sequence here. With `export`, stop behind the first token and keep its blocks lent until
    `Release` or `Abort`: a prefill worker's job. An exported sequence is admitted only when its whole prompt fits, and is
    never preempted."""

    spec: SequenceSpec
    export: bool = False


@dataclass(frozen=True, slots=True)
class Reserve:
    """Lend blocks for the whole prompt; waits its turn while the pool is full. Nothing runs until `Fill`."""

    spec: SequenceSpec


@dataclass(frozen=True, slots=True)
class Fill:
    """The reserved blocks hold the KV of all of `spec.tokens`, and `first_token` was drawn behind them: decode from the next
    step on. The first token is not emitted again."""

    request_id: RequestId
    first_token: SampledToken


@dataclass(frozen=True, slots=True)
class ComputeHere:
    """Give up a reservation (granted or queued) and compute the prompt here, ahead of all waiting sequences."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Release:
    """The exported blocks are not read any more; they stay in the prefix cache."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Abort:
    """End a sequence in whatever state. Unknown ids are ignored. No event follows."""

    request_id: RequestId


EngineCommand = Add | Reserve | Fill | ComputeHere | Release | Abort

# -- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reserved:
    """`block_ids` cover the whole prompt; the first `num_cached_tokens` (whole blocks) hold their KV already."""

    request_id: RequestId
    block_ids: tuple[BlockId, ...]
    num_cached_tokens: int


class BlocksComputed(msgspec.Struct, frozen=True, gc=False):
    """Of an exported sequence, after each step: the KV of `num_tokens` tokens from the start lies in `block_ids`."""

    request_id: RequestId
    num_tokens: int
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class SequenceTimes:
    """Seconds, of one sequence until its first token here."""

    queue_s: float  # Add or Fill until its first step began
    compute_s: float  # from there until the first token was drawn
    num_cached_tokens: int


class TokensSampled(msgspec.Struct, frozen=True, gc=False):
    """`first_index` counts output tokens, resumed ones included. `times` comes with a sequence's first tokens here, and
    `prompt`, the prompt's tokens with their log-probabilities, if they were asked for (the first one has none).
    With `finish`, the sequence is over and (unless exported) its blocks are the engine's again."""

    request_id: RequestId
    first_index: int
    tokens: tuple[SampledToken, ...]
    finish: FinishReason | None
    times: SequenceTimes | None = None
    prompt: tuple[SampledToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Rejected:
    """The sequence can never run here, or the runner failed on it; nothing is held for it."""

    request_id: RequestId
    reason: str
    invalid: bool  # True: the request's own fault


EngineEvent = Reserved | BlocksComputed | TokensSampled | Rejected


@dataclass(frozen=True, slots=True)
class EngineStats:
    """State at one moment; totals count from the start of the engine."""

    waiting: int
    running: int
    reserved: int
    exporting: int
    waiting_tokens: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    steps: int
    preemptions: int
    prefill_tokens: int  # computed prompt tokens, recomputed ones included
    decode_tokens: int
    cached_prompt_tokens: int
