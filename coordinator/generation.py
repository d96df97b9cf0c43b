"""The seam between the HTTP half of the coordinator and the half that places and follows sequences.

The HTTP half turns a client's request into one `SequenceSpec` per choice and reads tokens; everything behind `Generator`
(routing, hand-off, retries, replay) is invisible to it except for the timeline.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal, Protocol

from wire.sequence import FinishReason, SampledToken, SequenceSpec

Policy = Literal["always", "never", "auto"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a sequence ran; goes into response headers."""

    policy: Policy
    prefill: str | None  # worker ids; None: computed on the decode worker
    decode: str | None  # None: the first token was the last
    fallback: str | None = None  # why the policy's wish was not met


@dataclass(frozen=True, slots=True)
class Timeline:
    """Stages of one sequence in milliseconds; None where a stage did not happen."""

    route_ms: float
    reserve_ms: float | None
    prefill_queue_ms: float | None
    prefill_ms: float | None
    transfer_ms: float | None
    decode_queue_ms: float | None
    first_step_ms: float | None
    first_token_ms: float | None  # acceptance until the first token reached the coordinator
    total_ms: float | None


@dataclass(frozen=True, slots=True)
class Tokens:
    """New output tokens, in order, without gap or repetition. Nothing follows the one with `finish`.

    `prompt` holds the prompt's tokens with their log-probabilities.
    """

    tokens: tuple[SampledToken, ...]
    finish: FinishReason | None
    prompt: tuple[SampledToken, ...] = ()  # with the first ones, if the spec asks for `prompt_logprobs`; once


class GenerationError(Exception):
    """A sequence could not be generated.

    `status` is the HTTP status, `code` and `type` go into the error object, `retry_after_s` into a header.
    """

    def __init__(self, status: int, type_: str, code: str | None, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.type = type_
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


class Generation(Protocol):
    """One accepted sequence. Exactly one end: a `Tokens` with `finish`, or a raised `GenerationError`."""

    @property
    def placement(self) -> Placement | None:
        """None until placed."""

    @property
    def timeline(self) -> Timeline: ...

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV was reused where the prompt was computed; final once the first token has come."""

    def __aiter__(self) -> AsyncIterator[Tokens]: ...

    def cancel(self) -> None:
        """Stop at once and free everything everywhere; idempotent, fine after the end."""


class Generator(Protocol):
    @property
    def model(self) -> str | None:
        """The served model's name; None while no worker is registered."""

    @property
    def max_model_len(self) -> int | None: ...

    def ready(self) -> bool:
        """True when a request could be served now."""

    async def submit(self, spec: SequenceSpec, policy: Policy | None) -> Generation:
        """Place a sequence. Returns once it is accepted, so that refusals become HTTP errors before the first byte.

        Raises:
            GenerationError: no worker, no room, or it can never fit.
        """
