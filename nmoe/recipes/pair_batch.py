"""Batches of preference pairs. Each side of a pair is its own sequence; the two share the rows of their common beginning."""

# Shapes: T predicting positions, B sequences (two of each pair).

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from nmoe.data.pairs import Pair
from nmoe.learner.batch import Batch, alike, token_weights
from nmoe.text.renderers import IGNORED


def completion_batch(pairs: Sequence[Pair]) -> Batch:
    """Scores every learned token of both sides, with weights such that every pair counts 1 / (number of pairs)."""
    sides = [side for pair in pairs for side in pair.sides]
    scored = [[label != IGNORED for label in side.labels[1:]] for side in sides]
    targets = [
        [token if label == IGNORED else label for token, label in zip(side.ids[1:], side.labels[1:], strict=True)]
        for side in sides
    ]
    return _in_pairs([side.ids[:-1] for side in sides], targets, scored)


def reward_batch(pairs: Sequence[Pair]) -> Batch:
    """Scores the position that reads the last token of each sequence, with weights as in `completion_batch`."""
    sides = [side.ids for pair in pairs for side in pair.sides]
    return _in_pairs(sides, *_last_tokens(sides))


def last_token_batch(sequences: Sequence[Sequence[int]]) -> Batch:
    """Sequences that are no pairs, each scored at the position that reads its last token."""
    return _batch(sequences, *_last_tokens(sequences))


def _last_tokens(sequences: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[bool]]]:
    return [[0] * len(ids) for ids in sequences], [[False] * (len(ids) - 1) + [True] for ids in sequences]


def _in_pairs(
    inputs: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], scored: Sequence[Sequence[bool]]
) -> Batch:
    """A batch whose sequences 2 p and 2 p + 1 are pair p, the preferred one first."""
    shared = [alike(inputs[i], inputs[i + 1]) for i in range(0, len(inputs), 2)]
    return replace(
        _batch(inputs, targets, scored),
        prefixes=tuple((pair, rows) for pair, rows in enumerate(shared) for _ in range(2)),
        pairs=tuple((pair, preferred) for pair in range(len(shared)) for preferred in (True, False)),
    )


def _batch(
    inputs: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], scored: Sequence[Sequence[bool]]
) -> Batch:
    lengths = tuple(map(len, inputs))
    scored_T = torch.tensor([position for sequence in scored for position in sequence])
    return Batch(
        lengths=lengths,
        inputs_T=torch.tensor([token for sequence in inputs for token in sequence]),
        targets_T=torch.tensor([token for sequence in targets for token in sequence]),
        scored_T=scored_T,
        weights_T=token_weights("sequence", scored_T, lengths),
    )
