"""What samples are rewarded with, and which groups of them have something to teach."""

# Shapes: B samples, R rewards of a sample.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nmoe.config.tables.algorithm import AlgorithmSection
from nmoe.learner.length_reward import length_penalty, overlong_penalty
from nmoe.types import Group, Trajectory


def group_ids(groups: Sequence[Group]) -> Tensor:
    """Which group each judged sample is of, `[B]`."""
    return torch.tensor([place for place, group in enumerate(groups) for _ in group.trainable], dtype=torch.int64)


def sample_rewards(groups: Sequence[Group], algorithm: AlgorithmSection, token_limit: int) -> tuple[Tensor, Tensor]:
    """Rewards of every judged sample, `[B, R]`, and their weights, `[R]`; one that a sample lacks is NaN.

    Under `multi_reward = "sum"` there is one, the grade's score with what length adds; under "gdpo" each component of the rubric
    with a weight, and each reward for length, is its own. `token_limit` is the most tokens that a sample may have.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trainable]
    by_length = _length_rewards(trajectories, group_ids(groups), algorithm, token_limit)
    if algorithm.multi_reward == "sum":
        scores_B = torch.tensor([t.grade.score for t in trajectories])
        for weight, rewards_B in by_length:
            scores_B = scores_B + weight * rewards_B
        return scores_B.unsqueeze(-1), torch.ones(1)
    weights = {name: weight for t in trajectories for name, weight in t.grade.weights.items() if weight}
    columns = [
        torch.tensor([t.grade.components.get(name, torch.nan) for t in trajectories]) for name in sorted(weights)
    ]
    rewards_BR = torch.stack([*columns, *(rewards_B for _, rewards_B in by_length)], -1)
    weights_R = [*(weights[name] for name in sorted(weights)), *(weight for weight, _ in by_length)]
    return rewards_BR, torch.tensor(weights_R)


def _length_rewards(
    trajectories: Sequence[Trajectory], group_ids_B: Tensor, algorithm: AlgorithmSection, token_limit: int
) -> list[tuple[float, Tensor]]:
    """Rewards for length, `[B]` each, with their weights."""
    tokens_B = torch.tensor([t.sampled_tokens for t in trajectories])
    rewards = []
    if algorithm.overlong_buffer:
        rewards.append((1.0, overlong_penalty(tokens_B, token_limit, algorithm.overlong_buffer)))
    if algorithm.length_penalty:
        correct_B = torch.tensor([t.grade.extras["correctness"] == 1 for t in trajectories])
        rewards.append((algorithm.length_penalty, length_penalty(tokens_B, correct_B, group_ids_B)))
    return rewards


def differs(group: Group, algorithm: AlgorithmSection, token_limit: int) -> bool:
    """Whether rewards, those of steps included, differ within the group: otherwise every advantage in it is zero.

    A divergence from the reference that is a reward has not been measured yet; it differs between any two samples."""
    if len(group.trainable) < 2:
        return False
    if algorithm.kl_coef > 0 and algorithm.kl_in == "reward":
        return True
    rewards_BR, _ = sample_rewards([group], algorithm, token_limit)
    spread_R = rewards_BR.nan_to_num(-torch.inf).amax(0) - rewards_BR.nan_to_num(torch.inf).amin(0)
    steps = {score for t in group.trainable for _, score in t.grade.step_rewards}
    return bool((spread_R > 1e-9).any()) or (len(steps) > 1 and algorithm.step_reward_coef > 0)
