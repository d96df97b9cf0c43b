"""What an operator may set about the engine's scheduling."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one step and of what is in the engine at once.

    At most `min(max_num_sequences, max_batched_tokens)` sequences run or hold a reservation, so that every running one
    gets at least one token in each step.

    Raises:
        ValueError: a value is out of range; the message names its key.
    """

    max_batched_tokens: int = 512  # tokens of one step, over all sequences
    max_num_sequences: int = 256  # running and reserved ones
    prefill_chunk: int = 512  # prompt tokens of one sequence per step
    prefix_cache: bool = True
    priority_s: float = 1.0  # seconds of waiting that one step of priority stands for

    def __post_init__(self) -> None:
        for key in ("max_batched_tokens", "max_num_sequences", "prefill_chunk"):
            value = getattr(self, key)
            if value < 1:
                raise ValueError(f"{key} must be at least 1, not {value}")

    @property
    def max_active_sequences(self) -> int:
        return min(self.max_num_sequences, self.max_batched_tokens)
