"""Executes steps with a real model: the production `engine.runner.Runner`.

All sequences' tokens of a step run as one [T] batch through the model; only attention knows where one sequence ends. Logits
are computed for the rows that are sampled or scored, and for no others.
"""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import torch

from engine.attention import SequenceRows, TorchAttention
from engine.kernels.library import load_kernels
from engine.kv_pool import TORCH_DTYPES, KvPool
from engine.model_config import ModelConfig, load_model_config
from engine.model_files import weight_files
from engine.models.compiled import CompiledModel, why_not_compiled
from engine.models.linear import choose_linear
from engine.models.packed_linear import PackedLinears
from engine.models.weights import load_model
from engine.plan import SampleRequest, ScheduledSequence, ScoreRequest, StepPlan, StepResult
from engine.sampler import sample
from engine.scoring import score
from engine.step_model import StepModel, StepRows, TorchModel
from wire.ids import BlockId, RequestId
from wire.kv_layout import KvLayout
from wire.sequence import SamplingParams

logger = logging.getLogger(__name__)


def load_runner(
    path: Path,
    *,
    dtype: str,
    kv_memory: memoryview,
    num_blocks: int,
    block_size: int,
    max_model_len: int | None = None,
    device: str = "cpu",
    kernels: str = "auto",
) -> ModelRunner:
    """Load the model in directory `path`.

    Args:
        dtype: of weights and KV cache: float32, bfloat16 or float16.
        kv_memory: writable, at least `num_blocks` blocks of `ModelConfig.kv_layout(block_size, dtype)`; the runner keeps a
            view of it.
        max_model_len: a shorter context than the model's own.
        kernels: auto: the compiled ones where they can be had, else torch's operators; torch: never the compiled ones.

    Raises:
        ModelFilesError, UnsupportedModel: the model cannot be loaded.
        ValueError: an argument does not fit the model or this build.
    """
    if device != "cpu":
        raise ValueError(f"device {device!r} is not supported: the KV pool lies in host memory")
    if dtype not in TORCH_DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; supported: {', '.join(TORCH_DTYPES)}")
    if kernels not in ("auto", "torch"):
        raise ValueError(f"kernels {kernels!r} is not one of auto, torch")
    if block_size <= 0 or num_blocks <= 0:
        raise ValueError(f"block_size {block_size} and num_blocks {num_blocks} must be positive")
    config = load_model_config(path)
    if max_model_len is not None and not 0 < max_model_len <= config.max_model_len:
        raise ValueError(f"max_model_len {max_model_len} is not within the model's context of {config.max_model_len}")
    layout = config.kv_layout(block_size, dtype)
    pool = KvPool(layout, kv_memory, num_blocks)
    with torch.inference_mode():
        model = _load(path, config, pool, kernels)
    return ModelRunner(config, model, pool, max_model_len or config.max_model_len)


def _load(path: Path, config: ModelConfig, pool: KvPool, choice: str) -> StepModel:
    dtype = TORCH_DTYPES[pool.layout.dtype]
    if not config.own_layers:  # the one path on which a worker loads transformers
        module: Any = importlib.import_module("engine.models.transformers_model")
        model: StepModel = module.load_transformers_model(path, config, pool)
        return model
    hindrance = why_not_compiled(config, pool.layout.dtype)
    if choice == "auto" and hindrance is not None:
        logger.warning("this model runs without compiled kernels, and slower: %s", hindrance)
    kernels = load_kernels() if choice == "auto" and hindrance is None else None
    if kernels is None:
        torch_model = load_model(config, weight_files(path), dtype, choose_linear(dtype))
        return TorchModel(torch_model, TorchAttention(config, pool))
    return CompiledModel(config, load_model(config, weight_files(path), dtype, PackedLinears(kernels)), pool, kernels)


class ModelRunner:
    """Not thread-safe: all calls come from the engine thread."""

    def __init__(self, config: ModelConfig, model: StepModel, pool: KvPool, max_model_len: int) -> None:
        self.layout: KvLayout = pool.layout
        self.vocab_size = config.vocab_size
        self.max_model_len = max_model_len
        self._model = model
        self._pool = pool

    def warm_up(self) -> None:
        """A prompt and a decode row in block 0, greedy and drawn: loads kernels, threads and allocator pools."""
        length = min(self.layout.block_size, self.max_model_len)
        for start, tokens in ((0, max(1, length - 1)), (length - 1, 1)):
            for temperature in (0.0, 1.0):
                request = SampleRequest(SamplingParams(seed=0, temperature=temperature, top_p=0.9), position=start + tokens)
                sequence = ScheduledSequence(RequestId("warm-up"), (0,) * tokens, start, (BlockId(0),), request)
                self.execute(StepPlan(step=0, sequences=(sequence,)))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """
        Raises:
            ValueError: a sequence's tokens, positions or blocks are out of range; nothing was computed.
            ArithmeticError: the model gave no finite logits.
        """
        if not plan.sequences:
            return StepResult(plan.step)
        token_ids: list[int] = []
        positions: list[int] = []
        sequences: list[SequenceRows] = []
        logit_rows: list[int] = []
        sampled: list[tuple[RequestId, SampleRequest]] = []
        drawn_rows: list[int] = []  # of `logit_rows`, by index: those behind which a token is drawn
        scored: list[tuple[RequestId, ScoreRequest, int]] = []  # and where each scored sequence's rows begin
        for sequence in plan.sequences:
            self._check(sequence)
            num_tokens = len(sequence.token_ids)
            sequences.append(SequenceRows(len(token_ids), num_tokens, sequence.start, sequence.block_ids))
            token_ids.extend(sequence.token_ids)
            positions.extend(range(sequence.start, sequence.start + num_tokens))
            if sequence.score is not None:
                scored.append((sequence.request_id, sequence.score, len(logit_rows)))
                first = len(token_ids) - num_tokens + sequence.score.first_row
                logit_rows.extend(range(first, first + len(sequence.score.token_ids)))
            if sequence.sample is not None:
                drawn_rows.append(len(logit_rows))
                logit_rows.append(len(token_ids) - 1)
                sampled.append((sequence.request_id, sequence.sample))
        logits = self._model.run(StepRows(token_ids, positions, sequences, logit_rows))
        if logits is None:
            return StepResult(plan.step)
        values, best = logits.values, logits.best
        scores = {name: score(values[first : first + len(asked.token_ids)], asked) for name, asked, first in scored}
        if scored:
            values, best = values[drawn_rows], None if best is None else [best[row] for row in drawn_rows]
        drawn = sample(values, [request for _, request in sampled], best)
        tokens = {request_id: token for (request_id, _), token in zip(sampled, drawn, strict=True)}
        return StepResult(plan.step, tokens, scores)

    def _check(self, sequence: ScheduledSequence) -> None:
        """A wrong block id would write into another sequence's memory: refuse it here."""
        end = sequence.start + len(sequence.token_ids)
        name = sequence.request_id
        if not sequence.token_ids or sequence.start < 0 or end > self.max_model_len:
            raise ValueError(f"{name}: tokens {sequence.start}..{end} do not fit a context of {self.max_model_len}")
        if min(sequence.token_ids) < 0 or max(sequence.token_ids) >= self.vocab_size:
            raise ValueError(f"{name}: a token id is outside the vocabulary of {self.vocab_size}")
        if len(sequence.block_ids) < self.layout.blocks_for(end):
            raise ValueError(f"{name}: {len(sequence.block_ids)} blocks do not cover {end} tokens")
        if min(sequence.block_ids) < 0 or max(sequence.block_ids) >= self._pool.num_blocks:
            raise ValueError(f"{name}: a block id is outside the pool of {self._pool.num_blocks}")
