"""What objectives over preference pairs share: the two sides of every pair, and sums over sequences.

A pair's weight is the sum of `weights` over the tokens of both its sides. Under the aggregation "sequence" that is 1 / (pairs of
the whole optimizer batch), so that a sum of weighted losses is their mean, however the batch is split.
"""

# Shapes: N scored tokens of a micro-batch, B its sequences, P its pairs.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Pairs = Sequence[tuple[int, bool]]


def pair_sides(pairs: Pairs) -> tuple[list[int], list[int]]:
    """The numbers of the preferred sequences, and of those that they were preferred to, in one order of pairs. Raises ValueError
    for a pair that has not one of each."""
    preferred = {pair: place for place, (pair, is_preferred) in enumerate(pairs) if is_preferred}
    other = {pair: place for place, (pair, is_preferred) in enumerate(pairs) if not is_preferred}
    if preferred.keys() != other.keys() or len(preferred) + len(other) != len(pairs):
        raise ValueError(f"not every pair has one preferred side and one other: {tuple(pairs)}")
    return list(preferred.values()), [other[pair] for pair in preferred]


def sequence_sums(values_N: Tensor, sequence_N: Tensor, sequences: int) -> Tensor:
    """Sums over the scored tokens of each sequence, `[B]`."""
    return torch.zeros(sequences, dtype=values_N.dtype, device=values_N.device).index_add(0, sequence_N, values_N)
