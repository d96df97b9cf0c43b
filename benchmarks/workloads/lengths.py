"""Distributions of prompt and output lengths, in tokens."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

Tokens = Annotated[int, Meta(ge=1, le=1_000_000)]
Positive = Annotated[float, Meta(gt=0)]


class Fixed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="dist", tag="fixed"):
    tokens: Tokens


class Uniform(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="dist", tag="uniform"):
    """Every integer from `low` to `high`, both included."""

    low: Tokens
    high: Tokens

    def __post_init__(self) -> None:
        if self.high < self.low:
            raise ValueError("high: must not be below low")


class LogNormal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="dist", tag="lognormal"):
    """`sigma` is the standard deviation of the logarithm; lengths are cut to `low` … `high`."""

    mean: Positive
    sigma: Positive
    low: Tokens = 1
    high: Tokens = 1_000_000

    def __post_init__(self) -> None:
        if self.high < self.low:
            raise ValueError("high: must not be below low")


class Zipf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="dist", tag="zipf"):
    """Length `low + k` with a probability in proportion to 1 / (k + 1)^exponent, up to `high`."""

    exponent: Positive
    low: Tokens
    high: Tokens

    def __post_init__(self) -> None:
        if self.high < self.low:
            raise ValueError("high: must not be below low")


Lengths = Fixed | Uniform | LogNormal | Zipf


def draw_lengths(lengths: Lengths, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """`count` independent lengths, int64 [count]."""
    match lengths:
        case Fixed(tokens=tokens):
            return np.full(count, tokens, dtype=np.int64)
        case Uniform(low=low, high=high):
            return rng.integers(low, high, size=count, endpoint=True, dtype=np.int64)
        case LogNormal(mean=mean, sigma=sigma, low=low, high=high):
            mu = math.log(mean) - sigma**2 / 2  # so that the mean before cutting is `mean`
            drawn = np.rint(rng.lognormal(mu, sigma, size=count))
            return np.clip(drawn, low, high).astype(np.int64)
        case Zipf(exponent=exponent, low=low, high=high):
            ranks = np.arange(1, high - low + 2, dtype=np.float64)
            weights = ranks**-exponent
            return low + rng.choice(len(ranks), size=count, p=weights / weights.sum()).astype(np.int64)


def mean_length(lengths: Lengths) -> float:
    """The mean in closed form; of `LogNormal` before cutting."""
    match lengths:
        case Fixed(tokens=tokens):
            return float(tokens)
        case Uniform(low=low, high=high):
            return (low + high) / 2
        case LogNormal(mean=mean):
            return mean
        case Zipf(exponent=exponent, low=low, high=high):
            ranks = np.arange(1, high - low + 2, dtype=np.float64)
            weights = ranks**-exponent
            return float(low + ((ranks - 1) * weights).sum() / weights.sum())
