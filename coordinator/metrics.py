"""Prometheus metrics of the front door, on a registry that the caller gives (never the global one).

Label values come from code (route templates, status codes, outcomes), never from a client, so the number of series is
bounded.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from coordinator.generation import Timeline

_LATENCY_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_GAP_S = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_STAGE_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_STAGES = ("route", "reserve", "prefill_queue", "prefill", "transfer", "decode_queue", "first_step")
_DURATION_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


class RequestMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._requests = Counter(
            "kvrelay_http_requests",
            "Answered HTTP requests; status 499: the client left",
            ["route", "status"],
            registry=registry,
        )
        self._duration = Histogram(
            "kvrelay_http_request_duration_seconds",
            "Arrival of a request to the end of its answer",
            ["route"],
            buckets=_DURATION_S,
            registry=registry,
        )
        self._in_flight = Gauge("kvrelay_http_requests_in_flight", "HTTP requests being served", registry=registry)
        self._ttft = Histogram(
            "kvrelay_time_to_first_token_seconds",
            "Arrival of a request to a sequence's first token",
            buckets=_LATENCY_S,
            registry=registry,
        )
        self._itl = Histogram(
            "kvrelay_inter_token_latency_seconds", "Gap between a sequence's tokens", buckets=_GAP_S, registry=registry
        )
        self._e2e = Histogram(
            "kvrelay_request_e2e_seconds",
            "Arrival of a request to a sequence's last token",
            buckets=_DURATION_S,
            registry=registry,
        )
        self._stages = Histogram(
            "kvrelay_stage_seconds",
            "Stages of a sequence: route, reserve, prefill_queue, prefill, transfer, decode_queue, first_step",
            ["stage"],
            buckets=_STAGE_S,
            registry=registry,
        )
        self._sequences = Counter(
            "kvrelay_sequences",
            "Accepted sequences by how they ended: stop, length, error, cancelled",
            ["outcome"],
            registry=registry,
        )
        self._prompt_tokens = Counter("kvrelay_prompt_tokens", "Prompt tokens, once per prompt", registry=registry)
        self._cached_tokens = Counter("kvrelay_cached_prompt_tokens", "Prompt tokens whose KV was reused", registry=registry)
        self._completion_tokens = Counter("kvrelay_completion_tokens", "Generated tokens", registry=registry)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def request_started(self) -> None:
        self._in_flight.inc()

    def request_finished(self, route: str, status: int, duration_s: float) -> None:
        """`route` is a route's template, or ``unmatched``."""
        self._in_flight.dec()
        self._requests.labels(route, str(status)).inc()
        self._duration.labels(route).observe(duration_s)

    def first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)

    def token_gap(self, gap_s: float) -> None:
        self._itl.observe(gap_s)

    def sequence_finished(self, outcome: str, e2e_s: float, num_tokens: int) -> None:
        """`outcome`: stop, length, error or cancelled; only the first two count into the E2E histogram."""
        self._sequences.labels(outcome).inc()
        self._completion_tokens.inc(num_tokens)
        if outcome in ("stop", "length"):
            self._e2e.observe(e2e_s)

    def stages(self, timeline: Timeline) -> None:
        """Those that happened; once per sequence, at its end."""
        for stage in _STAGES:
            milliseconds: float | None = getattr(timeline, f"{stage}_ms")
            if milliseconds is not None:
                self._stages.labels(stage).observe(milliseconds / 1000)

    def prompt_accepted(self, num_tokens: int) -> None:
        self._prompt_tokens.inc(num_tokens)

    def prompt_cached(self, num_tokens: int) -> None:
        self._cached_tokens.inc(num_tokens)
