"""What an objective takes and gives."""

# Shapes: N scored tokens of a micro-batch.

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Outputs:
    """What the model says of the scored tokens: log-probabilities (with gradient) and entropies in nats (without)."""

    logprobs_N: Tensor
    entropy_N: Tensor


@dataclass(frozen=True)
class Scored:
    """The batch's columns at the scored tokens; a column that the batch lacks is None."""

    weights_N: Tensor
    advantages_N: Tensor | None = None
    behaviour_logprobs_N: Tensor | None = None
    reference_logprobs_N: Tensor | None = None


class Objective(Protocol):
    """Returns the weighted loss sum and statistics per token, `[N]` each and detached, which the learner joins over
    micro-batches so that a mean or a quantile is that of the whole batch."""

    def __call__(self, outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]: ...


def need(column_N: Tensor | None, name: str) -> Tensor:
    """The column, or an error that names it."""
    if column_N is None:
        raise ValueError(f"this objective needs the batch column {name!r}, which is missing")
    return column_N
