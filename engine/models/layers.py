"""Small pieces that the models share."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import torch
import torch.nn.functional as functional
from torch import Tensor

from engine.decoder_config import Activation

ACTIVATIONS: MappingProxyType[Activation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        Activation.SILU: functional.silu,
        Activation.GELU: functional.gelu,
        Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    }
)


class RmsNorm:
    """x / rms(x) × weight over the last dimension."""

    def __init__(self, weight: Tensor, eps: float, *, unit_offset: bool) -> None:
        """With `unit_offset` (Gemma) the factor is 1 + weight, kept in float32: 1 + w loses w's digits in bfloat16."""
        self.weight = 1.0 + weight.float() if unit_offset else weight
        self.eps = eps
        self._in_float32 = unit_offset and weight.dtype is not torch.float32

    def __call__(self, x: Tensor) -> Tensor:
        if self._in_float32:
            return torch.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)
        return torch.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm:
    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps

    def __call__(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
