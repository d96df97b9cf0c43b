"""What the runner needs of a model: one step's rows in, the wanted rows' logits out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.attention import AttentionKernel, AttentionStep, SequenceRows


@dataclass(frozen=True, slots=True)
class StepRows:
    """All sequences' tokens of a step, end to end."""

    token_ids: list[int]
    positions: list[int]
    sequences: Sequence[SequenceRows]
    logit_rows: list[int]  # ascending; may be empty


@dataclass(frozen=True, slots=True)
class StepLogits:
    """`values` may be overwritten by the model's next step.

    `best`: for each row the lowest id of its largest logit, or None where a logit is NaN or infinite; None: not known.
    """

    values: Tensor  # [R, vocab]
    best: list[int | None] | None = None


class StepModel(Protocol):
    def run(self, rows: StepRows) -> StepLogits | None:
        """Writes every row's keys and values into the pool. None: no row's logits were wanted."""


class CausalModel(Protocol):
    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionStep) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class TorchModel:
    """A model whose layers are torch operators."""

    def __init__(self, model: CausalModel, attention: AttentionKernel) -> None:
        self._model = model
        self._attention = attention

    def run(self, rows: StepRows) -> StepLogits | None:
        step = self._attention.begin(rows.sequences)
        hidden = self._model.forward(torch.tensor(rows.token_ids), torch.tensor(rows.positions), step)
        if not rows.logit_rows:
            return None
        wanted = hidden if len(rows.logit_rows) == hidden.shape[0] else hidden[rows.logit_rows]
        return StepLogits(self._model.logits(wanted))
