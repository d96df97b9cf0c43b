"""What the front door allows. Frozen; checked once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    served_model_name: str | None = None  # None: the model's own name
    api_keys: tuple[str, ...] = ()  # empty: no key needed
    api_keys_file: Path | None = None  # more of them, one a line; read again when it changes
    metrics_need_key: bool = True
    allow_policy_header: bool = False  # clients may choose always/never/auto with X-Kvrelay-Policy
    default_max_tokens: int = 16  # completions only; chat defaults to the rest of the context
    max_choices: int = 128  # n
    max_sequences: int = 256  # prompts × n of one request
    max_in_flight: int = 1024  # generating requests; more are refused with 429
    max_queued: int = 1024  # generating requests without a first token; more are refused with 429
    requests_per_minute: float = 0.0  # of one API key (or of all clients, where none is needed); 0: any number
    request_burst: int = 10  # requests at once that are let through after a pause
    request_timeout_s: float = 0.0  # for a whole generating request; clients may ask for less; 0: none
    retry_after_s: int = 1
    max_body_bytes: int = 4 * 1024 * 1024
    body_timeout_s: float = 30.0  # for the whole body
    grammar_timeout_s: float = 1.0  # for compiling one schema or grammar
    keepalive_s: float | None = 15.0  # a comment line into a silent stream; None: never
    write_timeout_s: float = 60.0  # a client that reads nothing for so long is taken for gone

    def __post_init__(self) -> None:
        for name in (
            "default_max_tokens",
            "max_choices",
            "max_sequences",
            "max_in_flight",
            "max_queued",
            "request_burst",
            "retry_after_s",
            "max_body_bytes",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.max_choices > 128:
            raise ValueError("max_choices must be at most 128")
        for name in ("body_timeout_s", "write_timeout_s", "grammar_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive")
        for name in ("requests_per_minute", "request_timeout_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative")
        if self.keepalive_s is not None and not self.keepalive_s > 0:
            raise ValueError("keepalive_s must be positive or None")
        if any(not key or not key.isascii() for key in self.api_keys):
            raise ValueError("api_keys must be non-empty ASCII")
