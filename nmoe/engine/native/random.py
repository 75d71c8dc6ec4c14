"""Counter-based uniforms: the draw for (seed, sample, position) is a pure function of those three numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", figure 14)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seed: int, samples: int, positions: int) -> NDArray[np.float32]:
    """Uniform draws in [0, 1), `[samples, positions]`, on a grid of 2^-24.

    A seed's stream of samples and a sample's stream of positions are each a SplitMix64 sequence, so that neither the number
    of samples nor of positions asked for changes a draw.
    """
    with np.errstate(over="ignore"):
        root = _mix(np.array([seed % 2**64], dtype=np.uint64) + _GOLDEN)
        sample = _mix(root + _GOLDEN * np.arange(1, samples + 1, dtype=np.uint64))
        draws = _mix(sample[:, None] + _GOLDEN * np.arange(1, positions + 1, dtype=np.uint64))
    return (draws >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
