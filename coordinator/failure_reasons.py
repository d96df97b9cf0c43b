"""Why a sequence was refused or ended badly, and what the client is told: one table."""

from __future__ import annotations

import enum

from coordinator.generation import GenerationError


class FailureReason(enum.Enum):
    INVALID = "invalid"
    TOO_LONG = "too_long"
    TOO_MANY = "too_many"
    OVERLOADED = "overloaded"
    NO_WORKER = "no_worker"
    NO_PREFILL = "no_prefill"
    PREFILL_FAILED = "prefill_failed"
    WORKER_FAILED = "worker_failed"
    SHUTTING_DOWN = "shutting_down"
    CANCELLED = "cancelled"


# reason: (HTTP status, type, code, may the client try again)
_CLIENT_VIEW: dict[FailureReason, tuple[int, str, str | None, bool]] = {
    FailureReason.INVALID: (400, "invalid_request_error", None, False),
    FailureReason.TOO_LONG: (400, "invalid_request_error", "context_length_exceeded", False),
    FailureReason.TOO_MANY: (429, "rate_limit_error", "too_many_requests", True),
    FailureReason.OVERLOADED: (503, "service_unavailable", "overloaded", True),
    FailureReason.NO_WORKER: (503, "service_unavailable", "no_worker", True),
    FailureReason.NO_PREFILL: (503, "service_unavailable", "no_prefill_worker", True),
    FailureReason.PREFILL_FAILED: (503, "service_unavailable", "prefill_failed", True),
    FailureReason.WORKER_FAILED: (503, "service_unavailable", "worker_failed", True),
    FailureReason.SHUTTING_DOWN: (503, "service_unavailable", "shutting_down", True),
    FailureReason.CANCELLED: (499, "cancelled", "cancelled", False),
}


def generation_error(reason: FailureReason, message: str, retry_after_s: int) -> GenerationError:
    status, type_, code, again = _CLIENT_VIEW[reason]
    return GenerationError(status, type_, code, message, retry_after_s if again else None)
