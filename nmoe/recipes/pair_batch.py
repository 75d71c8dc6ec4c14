"""From preference pairs to a training batch: both sides of a pair as sequences of their own that share the rows where they begin
alike."""

# Shapes: T predicting positions, B sequences (two of each pair).

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nmoe.learner.aggregation import token_weights
from nmoe.learner.batch import Batch


@dataclass(frozen=True)
class Pair:
    """A prompt and two completions of it, of which the first was preferred, as tokens; both end in the token that ends a turn.

    Example: `Pair(prompt_ids=(5, 6), chosen_ids=(7, 2), rejected_ids=(8, 9, 2))`.
    """

    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]

    @property
    def sides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Both sequences whole, the preferred one first."""
        return (*self.prompt_ids, *self.chosen_ids), (*self.prompt_ids, *self.rejected_ids)


def completion_batch(pairs: Sequence[Pair]) -> Batch:
    """Every token of both completions is scored; weights are such that every pair weighs 1 / (number of pairs)."""
    sides = [side for pair in pairs for side in pair.sides]
    prompts = [len(pair.prompt_ids) for pair in pairs for _ in range(2)]
    scored = [[i >= prompt - 1 for i in range(len(ids) - 1)] for ids, prompt in zip(sides, prompts, strict=True)]
    return _batch([ids[:-1] for ids in sides], [ids[1:] for ids in sides], scored)


def reward_batch(pairs: Sequence[Pair]) -> Batch:
    """Of every sequence the position that reads its last token is scored; what it predicts, which nobody asks, is given as 0."""
    sides = [side for pair in pairs for side in pair.sides]
    scored = [[False] * (len(ids) - 1) + [True] for ids in sides]
    return _batch(sides, [(*ids[1:], 0) for ids in sides], scored)


def _batch(
    inputs: Sequence[tuple[int, ...]], targets: Sequence[tuple[int, ...]], scored: Sequence[Sequence[bool]]
) -> Batch:
    lengths = tuple(map(len, inputs))
    scored_T = torch.tensor([position for sequence in scored for position in sequence])
    alike = [_common(*inputs[i : i + 2]) for i in range(0, len(inputs), 2)]
    return Batch(
        lengths=lengths,
        inputs_T=torch.tensor([token for sequence in inputs for token in sequence]),
        targets_T=torch.tensor([token for sequence in targets for token in sequence]),
        scored_T=scored_T,
        weights_T=token_weights("sequence", scored_T, lengths),
        prefixes=tuple((pair, shared) for pair, shared in enumerate(alike) for _ in range(2)),
        pairs=tuple((pair, preferred) for pair in range(len(alike)) for preferred in (True, False)),
    )


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return next((i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))
