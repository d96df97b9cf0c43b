"""Rotary position embedding (arXiv 2104.09864), in the half-split form that Hugging Face's weights are stored for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.decoder_config import RopeConfig


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """[rotary_dim / 2] radians per position, float32; each kind as `transformers.modeling_rope_utils` computes it."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    wavelengths = rope.theta**exponents  # over 2 pi
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.dim_factors, dtype=torch.float32) * wavelengths)
    frequencies = 1.0 / wavelengths
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, wavelengths)
    return frequencies


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Llama 3.1: slow turns are stretched, fast ones kept, and those between are mixed."""
    wavelength = 2 * math.pi / frequencies
    low_wavelength = rope.original_max_position / rope.low_freq_factor
    high_wavelength = rope.original_max_position / rope.high_freq_factor
    stretched = torch.where(wavelength > low_wavelength, frequencies / rope.factor, frequencies)
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    mixed = (1 - smooth) * stretched / rope.factor + smooth * stretched
    between = (wavelength >= high_wavelength) & (wavelength <= low_wavelength)
    return torch.where(between, mixed, stretched)


def _yarn(rope: RopeConfig, wavelengths: Tensor) -> Tensor:
    """YaRN (arXiv 2309.00071), section 3.2: a linear ramp from kept to stretched frequencies."""

    def correction_dim(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


class Rotation:
    """Cosines and sines of one step's positions; one object serves every layer with these settings."""

    def __init__(self, frequencies: Tensor, attention_factor: float, positions: Tensor, dtype: torch.dtype) -> None:
        angles = positions.float().view(-1, 1) * frequencies
        cosine, sine = angles.cos() * attention_factor, angles.sin() * attention_factor
        self._dim = 2 * frequencies.shape[0]
        # rotate(x) = x * cos + swap_halves(x) * (-sin, +sin)
        self._cosine = torch.cat((cosine, cosine), dim=-1).to(dtype).unsqueeze(1)
        self._sine = torch.cat((-sine, sine), dim=-1).to(dtype).unsqueeze(1)

    def apply(self, x: Tensor) -> Tensor:
        """x: [T, head, dim] -> the same, rotated; components behind `rotary_dim` pass through."""
        if self._dim < x.shape[-1]:
            return torch.cat((self._turn(x[..., : self._dim]), x[..., self._dim :]), dim=-1)
        return self._turn(x)

    def _turn(self, x: Tensor) -> Tensor:
        half = self._dim // 2
        swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
        return torch.addcmul(x * self._cosine, swapped, self._sine)
