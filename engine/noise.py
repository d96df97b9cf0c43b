"""Counter-based noise: a draw depends on (seed, position, token id) and on nothing else.

SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014) in counter mode: no state, so the
same request draws the same tokens alone, in any batch, on either worker and after a preemption; and noise for a few
candidates costs no more than that.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GAMMA = 0x9E3779B97F4A7C15  # SplitMix64's increment
_POSITION_GAMMA = 0xD1B54A32D192ED03  # odd, from the same author's collection: keeps (seed, position) pairs apart
_MASK = (1 << 64) - 1


def uniform_noise(seed: int, position: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in the open interval (0, 1) for each token id."""
    key = _mix_int(_mix_int((seed & _MASK) + _GAMMA) + (position & _MASK) * _POSITION_GAMMA)
    counters = token_ids.astype(np.uint64) * np.uint64(_GAMMA) + np.uint64(key)
    bits = _mix(counters) >> np.uint64(12)
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


def gumbel_noise(seed: int, position: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """argmax(logits + this) draws from softmax(logits) (Gumbel 1954; Maddison et al., arXiv 1411.0030)."""
    noise: NDArray[np.float64] = -np.log(-np.log(uniform_noise(seed, position, token_ids)))
    return noise


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _mix_int(z: int) -> int:
    """The same for one Python integer; the result is below 2 ** 64."""
    z &= _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
