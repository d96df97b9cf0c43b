"""A causal language model through transformers' own classes, with our paged attention inside their attention layers.

    tokens, positions [1, T] ─▶ transformers' module ─▶ in each layer, instead of its attention: write K and V into the pool,
                                                        attend over the pool ─▶ … ─▶ logits of the wanted rows

All sequences' tokens of a step go in as one row; transformers makes no mask for an attention that it does not know, and ours
knows where each sequence begins and ends. That holds for a model whose layers mix tokens in attention alone, take positions
from `position_ids`, and give their attention nothing that ours does not understand. Whether this one does is not believed
but tried, at the start: see `_inspect` and `_compare`.

Source: transformers' AttentionInterface (`transformers/modeling_utils.py`), made for backends of this kind (vLLM, TGI).
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from engine.attention import AttentionKernel, AttentionStep, SequenceRows, TorchAttention
from engine.decoder_config import LayerConfig, ModelConfig
from engine.errors import ModelFilesError, UnsupportedModel
from engine.kv_pool import TORCH_DTYPES, KvPool
from engine.step_model import StepLogits, StepRows

logger = logging.getLogger(__name__)

_ATTENTION = "kvrelay_paged"  # our name in transformers' table of attentions
_SEAM = "kvrelay_seam"
# Given to attentions along with what they need, and without meaning for ours.
_IGNORED = frozenset(
    {
        "cache_position",
        "is_causal",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
_TRIED_TOKENS = 24
_LONGEST_TRIED_WINDOW = 256
# Largest difference of logits, over the largest logit, between our attention and transformers' own.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}


@dataclass(frozen=True, slots=True)
class _LayerCall:
    """What one layer gave its attention."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    softcap: float | None
    window: int | None
    not_understood: tuple[str, ...]


@dataclass(slots=True)
class _Seam:
    """Where all attention layers of one model find the step that runs; without one, calls are only looked at."""

    step: AttentionStep | None = None
    calls: dict[int, list[_LayerCall]] = field(default_factory=dict)


def _paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """query: [1, head, T, dim]; key, value: [1, kv_head, T, dim] of the step's tokens -> [1, T, head, dim]"""
    seam: _Seam = getattr(module, _SEAM)
    if seam.step is not None:
        queries = query[0].transpose(0, 1).contiguous()
        seam.step.write(module.layer_idx, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return seam.step.attend(module.layer_idx, queries).view(1, *queries.shape), None
    strange = {name for name, given in others.items() if given is not None and name not in _IGNORED}
    if attention_mask is not None:
        strange.add("attention_mask")
    call = _LayerCall(
        heads=query.shape[1],
        kv_heads=key.shape[1],
        key_dim=key.shape[3],
        value_dim=value.shape[3],
        scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
        softcap=softcap,
        window=sliding_window,
        not_understood=tuple(sorted(strange)),
    )
    seam.calls.setdefault(module.layer_idx, []).append(call)
    return torch.zeros(1, query.shape[2], query.shape[1], value.shape[3], dtype=query.dtype), None


class TransformersModel:
    """Implements `engine.step_model.StepModel`."""

    def __init__(self, model: Any, seam: _Seam, attention: AttentionKernel) -> None:
        self._model = model
        self._seam = seam
        self._attention = attention
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def run(self, rows: StepRows) -> StepLogits | None:
        self._seam.step = self._attention.begin(rows.sequences)
        try:
            logits = _forward(self._model, rows.token_ids, rows.positions, rows.logit_rows if self._keeps_rows else None)
        finally:
            self._seam.step = None
        if not rows.logit_rows:
            return None
        return StepLogits(logits if self._keeps_rows else logits[rows.logit_rows])


def load_transformers_model(path: Path, config: ModelConfig, pool: KvPool) -> TransformersModel:
    """
    Args:
        config: as `engine.other_families` read it.
        pool: nobody's yet; its first blocks are written to.

    Raises:
        UnsupportedModel: our attention cannot stand in this family's layers, or does not give what its own gives.
        ModelFilesError: transformers cannot read the files.
    """
    transformers.utils.logging.disable_progress_bar()  # stderr is the worker's log
    transformers.AttentionInterface.register(_ATTENTION, _paged_attention)
    _check_class(path, config.family)
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            dtype=TORCH_DTYPES[pool.layout.dtype],
            attn_implementation=_ATTENTION,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelFilesError(f"{path}: transformers cannot load this model: {error}") from error
    _check_complete(path, report)
    model.eval()
    seam = _Seam()
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            setattr(module, _SEAM, seam)
    seen = _inspect(model, seam, config)
    paged = TransformersModel(model, seam, TorchAttention(seen, pool))
    _compare(paged, model, seen, pool)
    logger.warning(
        "family %s has no layers of its own here: it runs through transformers' classes with our attention, and slower",
        config.family,
    )
    return paged


def _check_class(path: Path, family: str) -> None:
    """Before any weight is read: does transformers have the family, and do its layers take another's attention?"""
    try:
        settings = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(settings)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnsupportedModel(f"model family {family!r}: transformers has no causal model of it: {first_line}") from error
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModel(f"model family {family!r}: transformers' layers of it take no other attention than their own")


def _check_complete(path: Path, report: Mapping[str, Any]) -> None:
    """transformers draws missing weights at random, and says so in a log alone."""
    for what, kind in (("missing_keys", "are missing"), ("mismatched_keys", "have another shape")):
        if names := sorted(str(name) for name in report[what]):
            raise ModelFilesError(f"{path}: {len(names)} weights {kind}, such as {', '.join(names[:3])}")
    if names := sorted(report["unexpected_keys"]):
        raise UnsupportedModel(f"{len(names)} weights have no place in this family, such as {', '.join(names[:3])}")


def _forward(model: Any, token_ids: Sequence[int], positions: Sequence[int], wanted: Sequence[int] | None) -> Tensor:
    """[R, vocab] of the `wanted` rows; None: of all."""
    kept = {} if wanted is None else {"logits_to_keep": torch.tensor(list(wanted), dtype=torch.long)}
    ids, at = torch.tensor([list(token_ids)]), torch.tensor([list(positions)])
    logits: Tensor = model(input_ids=ids, position_ids=at, use_cache=False, **kept).logits[0]
    return logits


def _inspect(model: Any, seam: _Seam, config: ModelConfig) -> ModelConfig:
    """One forward that only notes what each layer gives its attention; `config` with what that says.

    Raises:
        UnsupportedModel: it is not what config.json says, differs between layers, or is not understood.
    """
    family = config.family
    _forward(model, (0, 0), (0, 1), None)
    calls, seam.calls = seam.calls, {}
    if sorted(calls) != list(range(config.num_layers)) or any(len(each) != 1 for each in calls.values()):
        raise UnsupportedModel(f"model family {family!r}: its {config.num_layers} layers did not call attention once each")
    layers = [calls[index][0] for index in range(config.num_layers)]
    strange = sorted({name for call in layers for name in call.not_understood})
    if strange:
        raise UnsupportedModel(f"model family {family!r}: its attention wants {', '.join(strange)}")
    wanted = (config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim)
    for call in layers:
        found = (call.heads, call.kv_heads, call.key_dim, call.value_dim)
        if found != wanted:
            raise UnsupportedModel(
                f"model family {family!r}: (heads, KV heads, key size, value size) are {found}, and {wanted} by config.json"
            )
    if len({(call.scale, call.softcap) for call in layers}) > 1:
        raise UnsupportedModel(f"model family {family!r}: its layers scale or cap their scores differently")
    types = getattr(model.config, "layer_types", None) or ()
    if any(kind == "sliding_attention" and call.window is None for kind, call in zip(types, layers, strict=False)):
        raise UnsupportedModel(f"model family {family!r}: its sliding layers do not name their window")
    return replace(
        config,
        layers=tuple(LayerConfig(rope=None, window=call.window) for call in layers),
        attention_scale=layers[0].scale,
        attention_softcap=layers[0].softcap,
    )


def _compare(paged: TransformersModel, model: Any, config: ModelConfig, pool: KvPool) -> None:
    """A prompt by chunks and a decode step over the pool, against transformers' own attention in one piece.

    Raises:
        UnsupportedModel: they differ by more than rounding.
    """
    size = pool.layout.block_size
    windows = [layer.window for layer in config.layers if layer.window is not None and layer.window <= _LONGEST_TRIED_WINDOW]
    length = min(max([_TRIED_TOKENS, *(window + 8 for window in windows)]), config.max_model_len, pool.num_blocks * size)
    tokens = [(7919 * index + 11) % config.vocab_size for index in range(length)]
    blocks = tuple(reversed(range(-(-length // size))))
    borders = sorted({0, length // 2, length - 1, length})
    rows = []
    for start, end in itertools.pairwise(borders):
        part = SequenceRows(0, end - start, start, blocks)
        result = paged.run(StepRows(tokens[start:end], list(range(start, end)), [part], [end - start - 1]))
        assert result is not None
        rows.append(result.values[0].float())
    model.set_attn_implementation("eager")
    try:
        expected = _forward(model, tokens, range(length), None).float()
    finally:
        model.set_attn_implementation(_ATTENTION)
    wanted = expected[[end - 1 for end in borders[1:]]]
    difference = float((torch.stack(rows) - wanted).abs().max() / wanted.abs().max())
    if not difference <= _TOLERANCE[pool.layout.dtype]:
        raise UnsupportedModel(
            f"model family {config.family!r}: over paged blocks its logits are {difference:.1%} off from transformers' own; "
            "its positions or its state do not come from position_ids and the KV cache alone"
        )
