"""Linear layers for inference: packed once at load where this torch build can, plain otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

from engine.cpu_features import has_bfloat16_products

logger = logging.getLogger(__name__)

_WIDEN_FROM_ROWS = 16  # where widening's cost is made up for (measured: break-even between 8 and 32 rows)

Linear = Callable[[Tensor], Tensor]
"""[T, in] -> [T, out]"""


class LinearFactory(Protocol):
    def __call__(self, weight: Tensor, bias: Tensor | None, parts: Sequence[int] = ()) -> Linear:
        """
        Args:
            weight: [out, in]; the factory may keep a copy of its own in its place.
            bias: [out] or None.
            parts: sizes of the stacked matrices whose outputs are read together, such as gate and up: they sum to `out`.
        """


def plain_linear(weight: Tensor, bias: Tensor | None, parts: Sequence[int] = ()) -> Linear:
    def apply(x: Tensor) -> Tensor:
        return functional.linear(x, weight, bias)

    return apply


def packed_linear(weight: Tensor, bias: Tensor | None, parts: Sequence[int] = ()) -> Linear:
    """oneDNN's blocked order: twice as fast as `F.linear` for one bfloat16 row, and one copy serves every batch size."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)
    pointwise = torch.ops.mkldnn._linear_pointwise.default

    def apply(x: Tensor) -> Tensor:
        result: Tensor = pointwise(x, packed, bias, "none", [], "")
        return result

    return apply


def widening_linear(weight: Tensor, bias: Tensor | None, parts: Sequence[int] = ()) -> Linear:
    """For a CPU that emulates bfloat16 products: packed for few rows, where reading the weights is what costs; for many rows
    the weight is widened to float32 on the fly. Keeps the plain weight beside the packed one."""
    few_rows = packed_linear(weight, bias)
    wide_bias = None if bias is None else bias.float()

    def apply(x: Tensor) -> Tensor:
        if x.shape[0] < _WIDEN_FROM_ROWS:
            return few_rows(x)
        return functional.linear(x.float(), weight.float(), wide_bias).to(weight.dtype)

    return apply


def choose_linear(dtype: torch.dtype) -> LinearFactory:
    """The packed layer for bfloat16, if this build's private oneDNN operators work and agree with `F.linear`."""
    if dtype is not torch.bfloat16:
        return plain_linear
    weight = torch.arange(64 * 32).remainder(13).sub(6).to(dtype).view(64, 32)
    x = torch.arange(3 * 32).remainder(7).sub(3).to(dtype).view(3, 32)
    bias = torch.ones(64, dtype=dtype)
    try:
        agrees = torch.allclose(
            packed_linear(weight, bias)(x).float(), functional.linear(x, weight, bias).float(), rtol=0.02
        )
    except (AttributeError, RuntimeError, TypeError, NotImplementedError) as error:
        logger.warning("packed linear layers are not available (%s); using plain ones, which are slower", error)
        return plain_linear
    if not agrees:
        logger.warning("packed linear layers give wrong results on this build; using plain ones, which are slower")
        return plain_linear
    return packed_linear if has_bfloat16_products() else widening_linear
