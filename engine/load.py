"""The engine's state in the words of the control channel."""

from __future__ import annotations

from typing import Protocol

from engine.messages import EngineStats
from wire.control import WorkerLoad


class Totals(Protocol):
    """Of hand-offs (`service_kit.handoff_totals` has it)."""

    @property
    def handoffs(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def failures(self) -> int: ...


def worker_load(stats: EngineStats, totals: Totals, tokens_per_s: float, draining: bool) -> WorkerLoad:
    return WorkerLoad(
        waiting=stats.waiting,
        running=stats.running,
        reserved=stats.reserved,
        exporting=stats.exporting,
        waiting_tokens=stats.waiting_tokens,
        blocks_total=stats.blocks_total,
        blocks_free=stats.blocks_free,
        blocks_cached=stats.blocks_cached,
        blocks_held=stats.blocks_held,
        preemptions=stats.preemptions,
        prefill_tokens=stats.prefill_tokens,
        decode_tokens=stats.decode_tokens,
        cached_prompt_tokens=stats.cached_prompt_tokens,
        handoffs=totals.handoffs,
        handoff_bytes=totals.nbytes,
        handoff_failures=totals.failures,
        tokens_per_s=tokens_per_s,
        draining=draining,
    )
