"""From graded groups to a training batch: the tokens as they were sampled, with advantages and weights per token."""

# Shapes: T predicting positions, B trajectories, M largest kept set, Y layers, K chosen experts.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from nmoe.learner.aggregation import Aggregation, token_weights
from nmoe.learner.batch import Batch
from nmoe.types import Branch, Trajectory


def policy_batch(
    trajectories: Sequence[Trajectory], advantages_B: Tensor | None, aggregation: Aggregation, constant_length: int
) -> Batch:
    """One sequence per branch of a trajectory, which all have its advantage. Only tokens that the policy sampled are scored, stop
    tokens among them; what it was given is read and not learned. Without `advantages_B`, of the trajectories, that column is
    missing."""
    branches = [branch for trajectory in trajectories for branch in trajectory.branches]
    samples = tuple(place for place, trajectory in enumerate(trajectories) for _ in trajectory.branches)
    several = samples if len(branches) > len(trajectories) else None
    lengths = tuple(len(one.prompt_ids) + len(one.token_ids) - 1 for one in branches)
    tokens = [np.array([*one.prompt_ids, *one.token_ids]) for one in branches]
    # Position len(prompt) - 1 is the first to predict a token after the prompt.
    scored_T = (
        torch.from_numpy(np.concatenate([np.array([0] * (len(one.prompt_ids) - 1) + one.mask) for one in branches]))
        == 1
    )
    behaviour_T = np.concatenate([np.r_[np.zeros(len(one.prompt_ids) - 1), one.logprobs] for one in branches])
    if advantages_B is not None:
        advantages_T = torch.repeat_interleave(advantages_B[list(samples)], torch.tensor(lengths))
    return Batch(
        lengths=lengths,
        inputs_T=torch.from_numpy(np.concatenate([ids[:-1] for ids in tokens])),
        targets_T=torch.from_numpy(np.concatenate([ids[1:] for ids in tokens])),
        scored_T=scored_T,
        weights_T=token_weights(aggregation, scored_T, lengths, constant_length, several),
        advantages_T=None if advantages_B is None else advantages_T,
        behaviour_logprobs_T=torch.from_numpy(behaviour_T).float(),
        routes_TYK=_routes(branches),
        kept_TM=_kept(branches),
        prefixes=_prefixes(branches),
        samples=several,
    )


def selected(batch: Batch, sequences: Sequence[int], aggregation: Aggregation, constant_length: int) -> Batch:
    """These sequences of a batch, with weights whose denominators count them alone."""
    part, _ = batch.select(sequences)
    return replace(
        part, weights_T=token_weights(aggregation, part.scored_T, part.lengths, constant_length, part.samples)
    )


def _prefixes(branches: Sequence[Branch]) -> tuple[tuple[int, int], ...]:
    """The branches of one prompt share all of it; one that has no token has not even read its prompt's last."""
    first_of: dict[tuple[int, ...], int] = {}
    return tuple(
        (first_of.setdefault(t.prompt_ids, i), len(t.prompt_ids)) if t.token_ids else (i, 0)
        for i, t in enumerate(branches)
    )


def _routes(branches: Sequence[Branch]) -> Tensor | None:
    routes = [picks for t in branches if (picks := t.routes) is not None]
    if len(routes) < len(branches):
        return None
    return torch.from_numpy(np.concatenate(routes))


def _kept(branches: Sequence[Branch]) -> Tensor | None:
    """Kept sets `[T, M]` filled up with -1, where sampling cut the support."""
    kept_ids = [t.kept_ids for t in branches]
    if all(kept is None for kept in kept_ids):
        return None
    rows: list[list[int]] = []
    for branch, kept in zip(branches, kept_ids, strict=True):
        rows += [[]] * (len(branch.prompt_ids) - 1)
        rows += kept or [[]] * len(branch.token_ids)
    kept_TM = np.full((len(rows), max(map(len, rows))), -1, dtype=np.int64)
    for row, ids in zip(kept_TM, rows, strict=True):
        row[: len(ids)] = ids
    return torch.from_numpy(kept_TM)
