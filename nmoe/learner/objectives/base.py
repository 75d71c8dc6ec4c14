"""What an objective takes and gives."""

# Shapes: N scored tokens of a micro-batch, B its sequences, K outputs of a head.

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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
