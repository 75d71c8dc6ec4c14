"""Experience: the samples of a step as one packed batch, and its division into mini-batches for optimizer steps."""

# Shapes: B samples, S sequences (the branches of samples), T predicting positions, N scored ones, M largest kept set, Y layers, K
# chosen experts.

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nmoe.config.tables.algorithm import BatchSection
from nmoe.envs.pools.pool import stable_hash
from nmoe.learner.batch import Aggregation, Batch, token_weights
from nmoe.trajectory import NOT_SAMPLED_VERSION, Branch, Trajectory


@dataclass(frozen=True)
class Experience:
    """A batch to train on, with the group of each of its sequences.

    advantages: the advantages that metrics describe, before a correction and of truncated samples too: one per sample, or one per
    scored token (token that the policy sampled) under an estimator over tokens, with step rewards, or with a teacher. metrics:
    measurements taken while the batch was made.
    """

    batch: Batch
    group_ids_S: Tensor
    advantages: Tensor
    metrics: dict[str, float]

    def tokens_by_group(self, groups: int) -> list[int]:
        """Returns the number of scored tokens of each group."""
        ids_N = self.group_ids_S[self.batch.sequence_ids()[self.batch.scored_T]]
        return torch.bincount(ids_N, minlength=groups).tolist()


def minibatches(
    experience: Experience, sizes: BatchSection, aggregation: Aggregation, constant_length: int, *key: object
) -> Iterator[Batch]:
    """Yields a batch for each optimizer step of a training step; `aggregation` weighs a token's loss within its batch. Every pass
    over the experience deals its groups out anew, in an order drawn from a hash of `key`. A group is never divided, so that a pass
    with fewer groups than updates has only as many batches as groups."""
    members: dict[int, list[int]] = {}
    for sequence, group in enumerate(experience.group_ids_S.tolist()):
        members.setdefault(group, []).append(sequence)
    parts = min(sizes.updates_per_step, len(members))
    for number in range(sizes.passes_per_step):
        order = list(members)
        random.Random(stable_hash("minibatches", *key, number)).shuffle(order)
        for part in range(parts):
            sequences = sorted(i for group in order[part::parts] for i in members[group])
            yield selected(experience.batch, sequences, aggregation, constant_length)


def policy_batch(
    trajectories: Sequence[Trajectory],
    advantages_B: Tensor | None,
    aggregation: Aggregation,
    constant_length: int,
    version: int | None = None,
) -> Batch:
    """Builds the training batch of these trajectories, one sequence per branch, for a learner of this `version`. Only tokens that
    the policy sampled are scored (the loss covers them), stop tokens included; prompts and tool results are read but not learned.
    `advantages_B` holds one advantage per trajectory, for all its branches; None leaves the column out."""
    branches = [branch for trajectory in trajectories for branch in trajectory.branches]
    samples = tuple(index for index, trajectory in enumerate(trajectories) for _ in trajectory.branches)
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
        engines_T=_engines(branches),
        versions_T=_versions(branches, version),
        kept_TM=_kept(branches),
        prefixes=_prefixes(branches),
        samples=several,
    )


def selected(batch: Batch, sequences: Sequence[int], aggregation: Aggregation, constant_length: int) -> Batch:
    """Returns a batch with only these sequences, with loss weights computed anew over them."""
    part, _ = batch.select(sequences)
    return replace(
        part, weights_T=token_weights(aggregation, part.scored_T, part.lengths, constant_length, part.samples)
    )


def _prefixes(branches: Sequence[Branch]) -> tuple[tuple[int, int], ...]:
    """Returns `Batch.prefixes`: branches with the same prompt share all of it, except a branch without sampled tokens, which does
    not read the prompt's last token."""
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


def _engines(branches: Sequence[Branch]) -> Tensor | None:
    engines = [one.engines for one in branches]
    if None in engines:
        return None
    columns = zip(branches, engines, strict=True)
    return torch.tensor([n for one, own in columns for n in (*[-1] * (len(one.prompt_ids) - 1), *(own or ()))])


def _versions(branches: Sequence[Branch], learners: int | None) -> Tensor | None:
    """Returns `Batch.versions_T`, with the learner's own version at tokens that the policy did not sample; None if it is the only
    one."""
    sampled = {version for one in branches for version in one.versions} - {NOT_SAMPLED_VERSION, learners}
    if learners is None or not sampled:
        return None
    columns = ([learners] * (len(one.prompt_ids) - 1) + one.versions for one in branches)
    versions_T = torch.tensor([version for column in columns for version in column])
    return torch.where(versions_T == NOT_SAMPLED_VERSION, learners, versions_T)


def _kept(branches: Sequence[Branch]) -> Tensor | None:
    """Returns the ids that top-k or top-p left at each position, `[T, M]`, padded with -1; None if no branch was sampled from a
    truncated distribution."""
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
