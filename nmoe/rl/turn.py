"""One turn of a trajectory: what the policy was given before it, and what it sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nmoe.engine.api import FinishReason, Sample


@dataclass(frozen=True)
class Turn:
    """`given_ids` follow what was sampled before and lead up to this turn's sample: a tool's answer and the words that open the
    next turn. The first turn has none, for its prompt is the trajectory's."""

    given_ids: tuple[int, ...]
    sample: Sample


def single_turn(token_ids: Sequence[int], finish_reason: FinishReason = "stop") -> tuple[Turn, ...]:
    """The turns of a completion that was not sampled here and therefore has no log-probabilities, such as a worked example."""
    return (Turn((), Sample(list(token_ids), [], [], finish_reason)),)
