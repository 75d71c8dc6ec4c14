"""What an objective takes and gives."""

# Shapes: N scored tokens of a micro-batch, B its sequences, K outputs of a head.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Outputs:
    """What the model says of the scored tokens, all with gradient: log-probabilities, entropies in nats, and the raw outputs of the
    learner's head where it has one. A learner that trains a head alone computes no vocabulary, and both of the first are NaN."""

    logprobs_N: Tensor
    entropy_N: Tensor
    head_NK: Tensor | None = None


@dataclass(frozen=True)
class Scored:
    """The batch's columns at the scored tokens; a column that the batch lacks is None.

    `sequence_N` numbers the sequences of the micro-batch, 0 to B - 1, in int64. `pairs` says of each of them, in the same order,
    which pair it belongs to and whether it is the preferred one.
    """

    weights_N: Tensor
    advantages_N: Tensor | None = None
    behaviour_logprobs_N: Tensor | None = None
    reference_logprobs_N: Tensor | None = None
    old_logprobs_N: Tensor | None = None
    returns_N: Tensor | None = None
    old_values_N: Tensor | None = None
    labels_N: Tensor | None = None
    sequence_N: Tensor | None = None
    pairs: tuple[tuple[int, bool], ...] | None = None


class Objective(Protocol):
    """Returns the weighted loss sum and statistics per token, `[N]` each and detached, which the learner joins over
    micro-batches so that a mean or a quantile is that of the whole batch."""

    def __call__(self, outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]: ...


def need(column_N: Tensor | None, name: str) -> Tensor:
    """The column, or an error that names it."""
    if column_N is None:
        raise ValueError(f"this objective needs the batch column {name!r}, which is missing")
    return column_N


def total(*objectives: Objective) -> Objective:
    """Losses add up; statistics go side by side, under names that differ."""

    def objective(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        losses: list[Tensor] = []
        statistics: dict[str, Tensor] = {}
        for part in objectives:
            loss, reported = part(outputs, scored)
            losses.append(loss)
            statistics |= reported
        return torch.stack(losses).sum(), statistics

    return objective


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


# exp(20) is 4.9e8: beyond it a ratio says only that something broke, and fp32 gradients overflow soon after.
LOG_RATIO_CLAMP = 20.0


def log_ratio(outputs: Outputs, scored: Scored) -> Tensor:
    """`log pi(x_t) - log pi_old(x_t)`, `[N]`, with gradient and not yet clamped.

    pi_old is `old_logprobs`, the learner before the first of several updates, where the batch has that column, and else
    `behaviour_logprobs`, the sampler. With the column, what separates the two is left to `nmoe.learner.correction`.
    """
    if scored.old_logprobs_N is not None:
        return outputs.logprobs_N - scored.old_logprobs_N
    return outputs.logprobs_N - need(scored.behaviour_logprobs_N, "behaviour_logprobs")


def ratio(log_ratio_N: Tensor) -> Tensor:
    """`exp` of the log ratio clamped to +-20; beyond the clamp there is no gradient."""
    return log_ratio_N.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()


def sequence_means(values_N: Tensor, sequence_N: Tensor) -> Tensor:
    """Each token's value replaced by the mean over its sequence, `[N]`."""
    sequences = int(sequence_N.max()) + 1 if sequence_N.numel() else 0
    sums_B = sequence_sums(values_N, sequence_N, sequences)
    counts_B = sequence_sums(torch.ones_like(values_N), sequence_N, sequences)
    return (sums_B / counts_B.clamp(min=1))[sequence_N]
