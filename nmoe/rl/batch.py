"""From graded groups to a training batch: the tokens as they were sampled, with advantages and weights per token."""

# Shapes: T predicting positions, B samples, M largest kept set, Y layers, K chosen experts.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from nmoe.learner.aggregation import Aggregation, token_weights
from nmoe.learner.batch import Batch
from nmoe.types import Trajectory


def policy_batch(
    trajectories: Sequence[Trajectory], advantages_B: Tensor | None, aggregation: Aggregation, constant_length: int
) -> Batch:
    """One sequence per trajectory. Only tokens that the policy sampled are scored, its stop tokens among them; what tools answered
    is read and not learned. Without `advantages_B` that column is missing."""
    lengths = tuple(len(t.prompt_ids) + len(t.token_ids) - 1 for t in trajectories)
    tokens = [np.array([*t.prompt_ids, *t.token_ids]) for t in trajectories]
    # Position len(prompt) - 1 is the first to predict a token after the prompt.
    scored_T = (
        torch.from_numpy(np.concatenate([np.array([0] * (len(t.prompt_ids) - 1) + t.mask) for t in trajectories])) == 1
    )
    behaviour_T = np.concatenate([np.r_[np.zeros(len(t.prompt_ids) - 1), t.logprobs] for t in trajectories])
    return Batch(
        lengths=lengths,
        inputs_T=torch.from_numpy(np.concatenate([ids[:-1] for ids in tokens])),
        targets_T=torch.from_numpy(np.concatenate([ids[1:] for ids in tokens])),
        scored_T=scored_T,
        weights_T=token_weights(aggregation, scored_T, lengths, constant_length),
        advantages_T=None if advantages_B is None else torch.repeat_interleave(advantages_B, torch.tensor(lengths)),
        behaviour_logprobs_T=torch.from_numpy(behaviour_T).float(),
        routes_TYK=_routes(trajectories),
        kept_TM=_kept(trajectories),
        prefixes=_prefixes(trajectories),
    )


def selected(batch: Batch, sequences: Sequence[int], aggregation: Aggregation, constant_length: int) -> Batch:
    """These sequences of a batch, with weights whose denominators count them alone."""
    part, _ = batch.select(sequences)
    return replace(part, weights_T=token_weights(aggregation, part.scored_T, part.lengths, constant_length))


def _prefixes(trajectories: Sequence[Trajectory]) -> tuple[tuple[int, int], ...]:
    """The samples of one prompt share all of it; one that has no token has not even read its prompt's last."""
    first_of: dict[tuple[int, ...], int] = {}
    return tuple(
        (first_of.setdefault(t.prompt_ids, i), len(t.prompt_ids)) if t.token_ids else (i, 0)
        for i, t in enumerate(trajectories)
    )


def _routes(trajectories: Sequence[Trajectory]) -> Tensor | None:
    routes = [picks for t in trajectories if (picks := t.routes) is not None]
    if len(routes) < len(trajectories):
        return None
    return torch.from_numpy(np.concatenate(routes))


def _kept(trajectories: Sequence[Trajectory]) -> Tensor | None:
    """Kept sets `[T, M]` filled up with -1, where sampling cut the support."""
    kept_ids = [t.kept_ids for t in trajectories]
    if all(kept is None for kept in kept_ids):
        return None
    rows: list[list[int]] = []
    for trajectory, kept in zip(trajectories, kept_ids, strict=True):
        rows += [[]] * (len(trajectory.prompt_ids) - 1)
        rows += kept or [[]] * len(trajectory.token_ids)
    kept_TM = np.full((len(rows), max(map(len, rows))), -1, dtype=np.int64)
    for row, ids in zip(kept_TM, rows, strict=True):
        row[: len(ids)] = ids
    return torch.from_numpy(kept_TM)
