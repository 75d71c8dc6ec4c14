"""The interface of objectives (losses), and the functions that several of them share.

A preference pair's weight is the sum of the token weights of both its sides. With the aggregation "sequence" that is 1 / (pairs of
the whole optimizer batch), so that a sum of weighted losses is their mean, however the batch is split.
"""

# Shapes: N scored tokens of a micro-batch, B its sequences, P its pairs, K outputs of a head.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Outputs:
    """The model's outputs at the scored tokens (the tokens that the loss covers), all with gradient: log-probabilities, entropies
    in nats, and the raw outputs of the learner's head if it has one. A learner that trains only a head computes no vocabulary
    logits; the first two are then NaN."""

    logprobs_N: Tensor
    entropy_N: Tensor
    head_NK: Tensor | None = None


@dataclass(frozen=True)
class Scored:
    """The batch's columns, restricted to the scored tokens, as objectives read them; a column that the batch lacks is None.

    `sequence_N` is the index of each token's sequence in the micro-batch, 0 to B - 1, in int64. `pairs` gives for each sequence its
    preference pair and whether it is the preferred side.
    """

    weights_N: Tensor
    advantages_N: Tensor | None = None
    behaviour_logprobs_N: Tensor | None = None
    reference_logprobs_N: Tensor | None = None
    old_logprobs_N: Tensor | None = None
    returns_N: Tensor | None = None
    old_values_N: Tensor | None = None
    labels_N: Tensor | None = None
    label_weights_N: Tensor | None = None
    steps_N: Tensor | None = None
    sequence_N: Tensor | None = None
    pairs: tuple[tuple[int, bool], ...] | None = None


class Objective(Protocol):
    """A loss function: returns the weighted sum over the scored tokens, and named statistics per token, `[N]` each and detached.
    The learner joins the statistics of all micro-batches, so that a mean or a quantile covers the whole batch."""

    def __call__(self, outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]: ...


def need(column_N: Tensor | None, name: str) -> Tensor:
    """Returns the column, or raises ValueError with the column's name if it is None."""
    if column_N is None:
        raise ValueError(f"this objective needs the batch column {name!r}, which is missing")
    return column_N


def total(*objectives: Objective) -> Objective:
    """Returns an objective that is the sum of several, such as a policy loss, its penalties, an entropy bonus and a critic's loss.
    No two may report a statistic of the same name."""
    if len(objectives) == 1:
        return objectives[0]

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
    """Returns the indices of the preferred sequences, and of the other sequence of each of those pairs in the same order. Raises
    ValueError for a pair that does not have one of each."""
    preferred = {pair: index for index, (pair, is_preferred) in enumerate(pairs) if is_preferred}
    other = {pair: index for index, (pair, is_preferred) in enumerate(pairs) if not is_preferred}
    if preferred.keys() != other.keys() or len(preferred) + len(other) != len(pairs):
        raise ValueError(f"not every pair has one preferred side and one other: {tuple(pairs)}")
    return list(preferred.values()), [other[pair] for pair in preferred]


def sequence_sums(values_N: Tensor, sequence_N: Tensor, sequences: int) -> Tensor:
    """Sums a value per scored token over each sequence, `[B]`."""
    return torch.zeros(sequences, dtype=values_N.dtype, device=values_N.device).index_add(0, sequence_N, values_N)


# exp(20) is 4.9e8. A larger ratio only means that something broke, and fp32 gradients would soon overflow.
LOG_RATIO_CLAMP = 20.0


def log_ratio(outputs: Outputs, scored: Scored) -> Tensor:
    """Returns the log of the importance ratio, `log pi(x_t) - log pi_old(x_t)`, `[N]`, with gradient and not yet clamped.

    pi_old is `old_logprobs` (the learner before the first of several updates) if the batch has that column, and otherwise
    `behaviour_logprobs` (the sampler). With the column, `nmoe.rl.correction.correction_weights` accounts for the difference between
    the two.
    """
    if scored.old_logprobs_N is not None:
        return outputs.logprobs_N - scored.old_logprobs_N
    return outputs.logprobs_N - need(scored.behaviour_logprobs_N, "behaviour_logprobs")


def ratio(log_ratio_N: Tensor) -> Tensor:
    """Returns the importance ratio: `exp` of the log ratio clamped to +-20, outside of which there is no gradient."""
    return log_ratio_N.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()


def sequence_means(values_N: Tensor, sequence_N: Tensor) -> Tensor:
    """Returns for each token the mean of the values over its sequence, `[N]`."""
    sequences = int(sequence_N.max()) + 1 if sequence_N.numel() else 0
    sums_B = sequence_sums(values_N, sequence_N, sequences)
    counts_B = sequence_sums(torch.ones_like(values_N), sequence_N, sequences)
    return (sums_B / counts_B.clamp(min=1))[sequence_N]
