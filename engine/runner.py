"""What the engine needs of whatever executes its steps: the model runner, or the fake one."""

from __future__ import annotations

from typing import Protocol

from engine.plan import StepPlan, StepResult
from wire.kv_layout import KvLayout


class Runner(Protocol):
    """Executes steps over a KV pool whose memory the caller gave it. Called from the engine thread alone."""

    layout: KvLayout
    vocab_size: int
    max_model_len: int

    def warm_up(self) -> None:
        """Run every kind of step once, over block 0, so that the first request finds everything loaded."""

    def execute(self, plan: StepPlan) -> StepResult:
        """
        Raises:
            Exception: whatever went wrong; the engine rejects the sequences of this step and goes on.
        """
