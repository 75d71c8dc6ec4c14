"""Mixtures: several orders interleaved by weight, evenly and deterministically.

Position p goes to the source whose share of [0, 2**64) contains the p-th point of a golden-ratio (Weyl) sequence,

    point(p) = (offset(seed) + p * STEP) mod 2**64,   STEP = 2**64 / golden ratio, rounded to odd.

The sequence fills every interval in proportion to its length with an error that grows like the logarithm of p; the error of
independent draws grows like the square root. A million problems match their weights to within a few problems. Unlike in a
fixed cycle (ABABAB), every n-th point fills the interval too, so that no shard gets a single source.

References: H. Weyl, Über die Gleichverteilung von Zahlen mod. Eins (1916); Knuth, TAOCP vol. 3, section 6.4, on the golden
ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from nmoe.envs.pools.order import Order, fingerprint_of, stable_hash
from nmoe.types import Problem

_MODULUS = 2**64
_STEP = 0x9E3779B97F4A7C15


class Mixture:
    """Interleaves orders. A source's own position is the number of earlier positions of the mixture that went to it."""

    def __init__(self, name: str, sources: Sequence[Order], weights: Sequence[float], seed: int) -> None:
        """`weights` are positive and need not sum to 1."""
        self.name = name
        self.size = None
        self.read_as = "; ".join(source.read_as for source in sources if source.read_as)
        self.fingerprint = fingerprint_of("mixture", seed, *weights, *(source.fingerprint for source in sources))
        self.sources = sources
        self._offset = stable_hash("mixture", seed)
        total = sum(map(Fraction, weights))
        shares = [0, *(round(reached / total * _MODULUS) for reached in accumulate(map(Fraction, weights)))]
        self._shares = list(pairwise(shares))

    def at(self, position: int) -> Problem:
        point = (self._offset + position * _STEP) % _MODULUS
        source = next(i for i, (low, high) in enumerate(self._shares) if low <= point < high)
        return self.sources[source].at(self.count(source, position))

    def count(self, source: int, positions: int) -> int:
        """Counts how many of the first `positions` positions go to `source`, in time logarithmic in `positions`.

        A point x lies in [low, high) exactly when floor((x - low) / M) - floor((x - high) / M) is 1; otherwise it is 0.
        Leaving x unreduced adds the same to both terms, so that the count is a difference of two floor sums.
        """
        low, high = (floor_sum(positions, _MODULUS, _STEP, self._offset - bound) for bound in self._shares[source])
        return low - high


def floor_sum(n: int, modulus: int, step: int, start: int) -> int:
    """Computes the sum of floor((start + i * step) / modulus) for i in [0, n), by the Euclidean algorithm.

    It counts lattice points under a line: Graham, Knuth and Patashnik, Concrete Mathematics, section 3.5.
    """
    total = 0
    while n > 0:
        quotient, start = divmod(start, modulus)
        total += quotient * n
        quotient, step = divmod(step, modulus)
        total += quotient * (n * (n - 1) // 2)
        # The remaining points lie under a line with slope and offset below 1; swap the axes and count them by the other coordinate.
        height = start + step * n
        n, start = divmod(height, modulus)
        modulus, step = step, modulus
    return total
