"""From settings to an engine, in two steps, because the KV memory between them belongs to somebody else.

    shape = engine_shape(options)            layout, number of blocks, fingerprint: no weights loaded yet
    memory = … shape.pool_bytes of memory    the service's: a shared segment on D, plain memory on P
    engine = build_engine(options, shape, memory, …)

The runner is chosen by name and imported then: a process with the fake runner never loads torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from engine.core import EngineCore
from engine.engine_config import EngineConfig
from engine.engine_thread import EngineThread
from engine.errors import ModelFilesError
from engine.fake_runner import FakeRunner, fake_layout
from engine.grammar_state import GrammarFactory
from engine.messages import EngineEvent
from engine.model_config import ModelConfig, load_model_config
from engine.model_files import fingerprint
from engine.runner import Runner
from wire.kv_layout import Fingerprint, KvLayout, layout_digest


class EngineOptions(Protocol):
    """What is read of a worker's settings (`service_kit.worker_settings.EngineSettings` has it)."""

    @property
    def runner(self) -> str: ...  # "model" or "fake"
    @property
    def dtype(self) -> str: ...  # "auto": the model's own
    @property
    def device(self) -> str: ...
    @property
    def kernels(self) -> str: ...  # "auto" or "torch"
    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int | None: ...
    @property
    def kv_memory(self) -> int: ...  # bytes; used when num_blocks is None
    @property
    def max_batched_tokens(self) -> int: ...
    @property
    def prefill_chunk(self) -> int: ...
    @property
    def max_num_sequences(self) -> int: ...
    @property
    def max_model_len(self) -> int | None: ...
    @property
    def fake_step_s(self) -> float: ...
    @property
    def fake_token_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class EngineShape:
    model_dir: Path
    model: ModelConfig
    dtype: str
    layout: KvLayout
    num_blocks: int
    max_model_len: int
    fingerprint: Fingerprint

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size


def engine_shape(options: EngineOptions, model_dir: Path) -> EngineShape:
    """
    Raises:
        UnsupportedModel, ModelFilesError: the model cannot be served.
        ValueError: a setting does not fit the model.
    """
    model = load_model_config(model_dir)
    dtype = model.default_dtype if options.dtype == "auto" else options.dtype
    max_model_len = options.max_model_len or model.max_model_len
    if max_model_len > model.max_model_len:
        raise ValueError(f"max_model_len: {max_model_len} is beyond the model's context of {model.max_model_len} tokens")
    if options.runner == "fake":
        layout = fake_layout(options.block_size)
        identity = Fingerprint(f"fake runner, vocabulary {model.vocab_size}", layout_digest(layout))
    else:
        layout = model.kv_layout(options.block_size, dtype)
        identity = fingerprint(model_dir, model, layout)
    # A pool larger than max_num_sequences full contexts could never be filled.
    useful = options.max_num_sequences * layout.blocks_for(max_model_len)
    num_blocks = options.num_blocks or min(useful, options.kv_memory // layout.block_bytes)
    if num_blocks < 2:
        raise ValueError(
            f"kv_memory: {options.kv_memory} bytes hold {num_blocks} blocks of {layout.block_bytes}; 2 are needed"
        )
    return EngineShape(model_dir, model, dtype, layout, num_blocks, max_model_len, identity)


def build_engine(
    options: EngineOptions,
    shape: EngineShape,
    kv_memory: memoryview,
    on_events: Callable[[tuple[EngineEvent, ...]], object],
    on_failure: Callable[[BaseException], object],
    grammars: GrammarFactory | None = None,
) -> EngineThread:
    """Load the weights and make the engine; `start` is the caller's. `kv_memory` stays the caller's.

    Args:
        grammars: None: sequences with a grammar are rejected.
    """
    runner = _build_runner(options, shape, kv_memory)
    config = EngineConfig(
        max_batched_tokens=options.max_batched_tokens,
        max_num_sequences=options.max_num_sequences,
        prefill_chunk=options.prefill_chunk,
    )
    core = EngineCore(config, shape.layout, shape.num_blocks, shape.max_model_len, grammars)
    return EngineThread(core, runner, on_events, on_failure=on_failure)


def _build_runner(options: EngineOptions, shape: EngineShape, kv_memory: memoryview) -> Runner:
    if options.runner == "fake":
        return FakeRunner(
            shape.layout,
            kv_memory,
            shape.num_blocks,
            shape.model.vocab_size,
            shape.max_model_len,
            step_s=options.fake_step_s,
            prefill_token_s=options.fake_token_s,
            decode_token_s=options.fake_token_s,
        )
    if options.runner != "model":
        raise ModelFilesError(f"runner: {options.runner!r} is not one of model, fake")
    module: Any = importlib.import_module("engine.model_runner")
    runner: Runner = module.load_runner(
        shape.model_dir,
        dtype=shape.dtype,
        kv_memory=kv_memory,
        num_blocks=shape.num_blocks,
        block_size=options.block_size,
        max_model_len=shape.max_model_len,
        device=options.device,
        kernels=options.kernels,
    )
    return runner
