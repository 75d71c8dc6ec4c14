"""Computes the rewards of a group's samples: the graders' scores, efficiency by comparison, and the penalty for length.

It does so once, when the group has been sampled. The sampler drops a group whose rewards are equal, and advantages are estimated
from the rewards of the others.
"""

# Shapes: G samples of one group, B samples of all groups, R rewards of a sample.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nmoe.config.tables.algorithm import AlgorithmSection
from nmoe.learner.batch import Batch, sequence_of
from nmoe.trajectory import Group, Trajectory

# Added to a denominator that may be 0.
EPSILON = 1e-6

# By the key that asks for it, in brackets, which no name of another reward has.
_OVERLONG = "[overlong_buffer]"


@dataclass(frozen=True)
class RewardedGroup:
    """A group with its judged samples and their rewards:

        RewardedGroup(group, [first, second], {"format": tensor([1.0, nan]), "correctness": tensor([0.0, 1.0])},
                      {"format": 0.1, "correctness": 1.0}, differs=True)

    rewards: by name, one value per sample each; NaN where a sample has none of that name. weights: the weight of each reward, by
    name. differs: whether advantages that compare the samples of the group can be other than 0: its rewards differ, its step
    rewards give a token an advantage, or the KL penalty, which is not yet measured, is a reward. False for fewer than two samples.
    """

    group: Group
    samples: Sequence[Trajectory]
    rewards: Mapping[str, Tensor]
    weights: Mapping[str, float]
    differs: bool


class GroupRewards:
    """Computes, from the grades of a group's samples, each sample's rewards before advantages: the score, in which efficiency is
    compared within the group's right samples, with the penalty for length, by `multi_reward` and `overlong_buffer` of
    [algorithm]."""

    def __init__(self, algorithm: AlgorithmSection, token_limit: int) -> None:
        """Keeps the settings. `token_limit` is the largest number of tokens that the policy can sample for one sample, from which
        the penalty for overlong samples is counted."""
        self._algorithm, self._token_limit = algorithm, token_limit

    def of(self, group: Group) -> RewardedGroup:
        """Returns the group with its rewards.

        Under `multi_reward = "sum"` there is one reward: the grade's score plus the penalty for length. Under "gdpo" each weighted
        component of the rubric and the penalty for length is a separate reward.
        """
        samples = group.trainable
        if not samples:
            return RewardedGroup(group, samples, {}, {}, differs=False)
        unused_G = torch.tensor([sample.grade.components.get("efficiency", torch.nan) for sample in samples])
        correct_G = torch.tensor([sample.grade.extras.get("correctness") == 1 for sample in samples])
        efficiency_G = efficiency_rewards(unused_G, correct_G)
        buffer = self._algorithm.overlong_buffer
        if self._algorithm.multi_reward == "sum":
            scores_G = torch.tensor([sample.grade.score for sample in samples])
            weights_G = torch.tensor([sample.grade.weights.get("efficiency", 0.0) for sample in samples])
            scores_G = scores_G + weights_G * (efficiency_G - unused_G).nan_to_num(0.0)
            if buffer:
                scores_G = scores_G + self._overlong(samples)
            rewards, weights = {"score": scores_G}, {"score": 1.0}
        else:
            weights = {name: weight for one in samples for name, weight in one.grade.weights.items() if weight}
            rewards = {
                name: torch.tensor([sample.grade.components.get(name, torch.nan) for sample in samples])
                for name in weights
            }
            if "efficiency" in rewards:
                rewards["efficiency"] = efficiency_G
            if buffer:
                rewards[_OVERLONG], weights[_OVERLONG] = self._overlong(samples), 1.0
        return RewardedGroup(group, samples, rewards, weights, self._differ(samples, rewards))

    def _overlong(self, samples: Sequence[Trajectory]) -> Tensor:
        tokens_G = torch.tensor([sample.sampled_tokens for sample in samples])
        return overlong_penalty(tokens_G, self._token_limit, self._algorithm.overlong_buffer)

    def _differ(self, samples: Sequence[Trajectory], rewards: Mapping[str, Tensor]) -> bool:
        algorithm = self._algorithm
        if len(samples) < 2:
            return False
        # A divergence from the reference as a reward is not measured yet; it differs between any two samples.
        if algorithm.kl_coef > 0 and algorithm.kl_in == "reward":
            return True
        spreads = [r_G.nan_to_num(-torch.inf).max() - r_G.nan_to_num(torch.inf).min() for r_G in rewards.values()]
        if any(bool(spread > 1e-9) for spread in spreads):
            return True
        return algorithm.step_reward_coef > 0 and _steps_differ(samples, algorithm)


def _steps_differ(samples: Sequence[Trajectory], algorithm: AlgorithmSection) -> bool:
    """Returns whether step rewards give any token an advantage. With the baseline `normalised` they have to differ. Otherwise one
    that is not 0 suffices, because samples have different numbers of steps, and tokens of one sample different numbers of steps
    ahead."""
    scores = {score for sample in samples for _, score in sample.grade.step_rewards}
    return len(scores) > 1 if algorithm.step_baseline == "normalised" else bool(scores - {0.0})


def joined(groups: Sequence[RewardedGroup]) -> tuple[Tensor, Tensor]:
    """Stacks the named rewards of all groups, `[B, R]` with NaN for a missing one, and their weights, `[R]`."""
    weights = {name: weight for one in groups for name, weight in one.weights.items()}
    names = [*sorted(weights.keys() - {_OVERLONG}), *([_OVERLONG] if _OVERLONG in weights else [])]
    columns = [
        torch.cat([one.rewards.get(name, torch.full((len(one.samples),), torch.nan)) for one in groups])
        for name in names
    ]
    return torch.stack(columns, -1), torch.tensor([weights[name] for name in names])


def judged(groups: Sequence[RewardedGroup]) -> list[Trajectory]:
    """Returns the judged samples of all groups in one list, in order: those that no failure of the infrastructure kept from being
    graded."""
    return [sample for one in groups for sample in one.samples]


def group_ids(groups: Sequence[RewardedGroup]) -> Tensor:
    """Returns for each judged sample the index of its group, `[B]`."""
    return torch.tensor([index for index, one in enumerate(groups) for _ in one.samples], dtype=torch.int64)


def step_rewards(batch: Batch, samples: Sequence[Trajectory]) -> Tensor:
    """Returns a column with each step's reward at the position that predicts the step's last token, `[T]`; NaN elsewhere. Several
    rewards at one position, as from several verifiers, are added."""
    rewards_T = torch.full(batch.scored_T.shape, torch.nan)
    start = 0
    for sample in samples:
        # The position that predicts each of the sample's tokens; no position predicts a prompt's tokens.
        positions: list[int | None] = []
        for branch in sample.branches:
            prompt, tokens = len(branch.prompt_ids), len(branch.token_ids)
            positions += [None] * (prompt if positions else 0)
            positions += range(start + prompt - 1, start + prompt - 1 + tokens)
            start += prompt + tokens - 1
        for token, reward in sample.grade.step_rewards:
            position = positions[token]
            assert position is not None, "no step ends in a prompt"
            assert batch.scored_T[position], "a step ends at a token that the policy sampled"
            rewards_T[position] = rewards_T[position].nan_to_num(0.0) + reward
    return rewards_T


def terminal_rewards(rewards_B: Tensor, scored_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """Returns a column with each sequence's reward at its last scored position, `[T]`; 0 elsewhere. The reward of a sequence
    without scored positions is dropped."""
    rewards_T = torch.zeros(len(scored_T), dtype=rewards_B.dtype)
    sequence_T = sequence_of(lengths)
    positions_N = scored_T.nonzero().squeeze(-1)
    last_B = torch.full((len(lengths),), -1).scatter_reduce_(0, sequence_T[positions_N], positions_N, "amax")
    ended_B = last_B >= 0
    rewards_T[last_B[ended_B]] = rewards_B[ended_B]
    return rewards_T


def overlong_penalty(tokens_G: Tensor, max_tokens: int, buffer_tokens: int) -> Tensor:
    """Computes DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, eq. 13), `[G]` between 0 and -1: 0 up to
    `max_tokens - buffer_tokens` sampled tokens, then linearly down to -1 at `max_tokens`.

    With a single penalty at the limit, the policy cannot see that length was the reason; the slope shows it.
    """
    over_G = tokens_G.double() - (max_tokens - buffer_tokens)
    return (-over_G / buffer_tokens).clamp(-1.0, 0.0).float()


def efficiency_rewards(unused_G: Tensor, correct_G: Tensor) -> Tensor:
    """Computes the reward for efficiency, `[G]`: the share of the group's right samples that left less unused than this one, where
    equal ones, itself among them, count half; 0 for a wrong sample, NaN where `unused_G` is NaN.

    The right samples of any group have a mean of 0.5, so that brevity competes with brevity alone, and however short samples
    already are, the shorter half is paid. Kimi k1.5's length reward (arXiv:2501.12599, section 2.3.3) compares within a group,
    too, but by the distance to the shortest and longest of all samples, wrong ones among them.
    """
    unused_C = unused_G[correct_G]
    rewards_G = torch.zeros_like(unused_G)
    rewards_G[correct_G] = ((unused_C[:, None] > unused_C).float() + 0.5 * (unused_C[:, None] == unused_C)).mean(1)
    return rewards_G.where(~unused_G.isnan(), torch.nan)


def _group_sums(values_B: Tensor, group_ids_B: Tensor) -> tuple[Tensor, Tensor]:
    """Returns for each sample the sum and the number of its group's values, `[B]` each; NaN values count in neither. In fp64,
    because under `grpo` rounding in a mean of equal rewards would be divided by a deviation that is rounding too."""
    _, dense_B = torch.unique(group_ids_B, return_inverse=True)
    groups = int(dense_B.max()) + 1 if dense_B.numel() else 0
    values_B = values_B.double()
    present_B = (~values_B.isnan()).double()
    sums_G = values_B.new_zeros(groups).index_add_(0, dense_B, values_B.nan_to_num(0.0))
    sizes_G = values_B.new_zeros(groups).index_add_(0, dense_B, present_B)
    return sums_G[dense_B], sizes_G[dense_B]


def group_means(values_B: Tensor, group_ids_B: Tensor) -> Tensor:
    sums_B, sizes_B = _group_sums(values_B, group_ids_B)
    return sums_B / sizes_B


def group_normalised(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """Normalises each reward by its group, `(r - mean_g) / (std_g + 1e-6)` with the unbiased deviation, `[B]` in fp64. NaN is left
    out of the statistics and stays NaN."""
    centred_B = rewards_B - group_means(rewards_B, group_ids_B)
    squares_B, sizes_B = _group_sums(centred_B.square(), group_ids_B)
    std_B = (squares_B / (sizes_B - 1).clamp(min=1)).sqrt()
    return centred_B / (std_B + EPSILON)


def others_means(values_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """Returns for each sample the mean over the other samples of its group, `[B]` in fp64: a baseline that does not depend on the
    sample. NaN for the only sample of a group."""
    sums_B, sizes_B = _group_sums(values_B, group_ids_B)
    return torch.where(sizes_B > 1, (sums_B - values_B) / (sizes_B - 1).clamp(min=1), torch.nan)
