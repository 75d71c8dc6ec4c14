"""From graded groups to the advantage of every token, by the estimator that [algorithm] names."""

# Shapes: B samples, S sequences, T predicting positions, N scored ones, R rewards of a sample.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nmoe.config.commands.rl import RLConfig
from nmoe.config.tables.algorithm import AlgorithmSection
from nmoe.learner.advantages import ADVANTAGES, gdpo
from nmoe.learner.batch import Batch
from nmoe.learner.token_advantages import (
    divergence_rewards,
    gae,
    process_supervision,
    reinforce_pp,
    scored_sums,
    terminal_rewards,
    whiten,
)
from nmoe.rl.rewards import group_ids, sample_rewards
from nmoe.types import Group, Trajectory


def with_advantages(batch: Batch, groups: Sequence[Group], config: RLConfig, token_limit: int) -> tuple[Batch, Tensor]:
    """The batch with advantages and, under gae, the critic's targets; and the advantages to take figures of: of samples where the
    estimator is one over samples, else of tokens.

    The batch has one sequence for each branch of the judged samples of the groups, in order, with the reference's log-probabilities
    where the divergence is a reward, and the critic's values where there is one. Step rewards join as rewards of tokens, or by the
    process supervision of GRPO where the estimator is one over samples. The branches of a sample share its reward:
    estimators over samples give all its tokens one advantage, those over tokens see the reward at the end of each branch.
    """
    algorithm, ids_B = config.algorithm, group_ids(groups)
    rewards_BR, weights_R = sample_rewards(groups, algorithm, token_limit)
    trajectories = [trajectory for group in groups for trajectory in group.trainable]
    steps_T = _step_rewards(batch, trajectories)
    divergence_T = reward_divergence(batch, algorithm)
    sample_S, lengths_S = batch.sample_ids(), torch.tensor(batch.lengths)
    if algorithm.in_groups:
        if algorithm.multi_reward == "gdpo":
            advantages_B = gdpo(rewards_BR, weights_R, ids_B)
        else:
            rewards_B = rewards_BR[:, 0]
            if divergence_T is not None:
                sums_S = scored_sums(divergence_T, batch.scored_T, batch.lengths)
                rewards_B = rewards_B + sums_S.new_zeros(len(trajectories)).index_add_(0, sample_S, sums_S).float()
            advantages_B = ADVANTAGES[algorithm.advantage](rewards_B, ids_B)
        advantages_T = torch.repeat_interleave(advantages_B[sample_S], lengths_S)
        if not bool(steps_T.isnan().all()):
            process_T = process_supervision(steps_T, ids_B[sample_S], batch.scored_T, batch.lengths)
            advantages_T = advantages_T + algorithm.step_reward_coef * process_T
            return replace(batch, advantages_T=advantages_T), advantages_T[batch.scored_T]
        return replace(batch, advantages_T=advantages_T), advantages_B
    rewards_T = terminal_rewards(rewards_BR[sample_S, 0], batch.scored_T, batch.lengths)
    rewards_T = rewards_T + algorithm.step_reward_coef * steps_T.nan_to_num(0.0)
    if divergence_T is not None:
        rewards_T = rewards_T + divergence_T
    if algorithm.advantage == "reinforce_pp":
        advantages_T = reinforce_pp(rewards_T, batch.scored_T, batch.lengths)
        return replace(batch, advantages_T=advantages_T), advantages_T[batch.scored_T]
    assert config.critic is not None, "gae was refused without a critic"
    assert batch.old_values_T is not None, "its critic was asked"
    raw_T, returns_T = gae(
        rewards_T, batch.old_values_T, batch.scored_T, batch.lengths, config.critic.gamma, config.critic.trace_decay
    )
    advantages_T = whiten(raw_T, batch.scored_T)
    return replace(batch, advantages_T=advantages_T, returns_T=returns_T), raw_T[batch.scored_T]


def reward_divergence(batch: Batch, algorithm: AlgorithmSection) -> Tensor | None:
    """The divergence of the policy that sampled from the reference as a reward of tokens, `[T]`, where it is one."""
    if algorithm.kl_coef == 0 or algorithm.kl_in == "loss":
        return None
    assert batch.behaviour_logprobs_T is not None
    assert batch.reference_logprobs_T is not None
    return divergence_rewards(
        batch.behaviour_logprobs_T,
        batch.reference_logprobs_T,
        batch.scored_T,
        algorithm.kl_coef,
        algorithm.kl_estimator or "k1",
    )


def _step_rewards(batch: Batch, trajectories: Sequence[Trajectory]) -> Tensor:
    """What verifiers gave to steps, at the position that decides on a step's last token, `[T]`; NaN elsewhere. Several rewards of
    one place, as of several verifiers, add up."""
    rewards_T = torch.full((batch.tokens,), torch.nan)
    start = 0
    for trajectory in trajectories:
        # The position that predicts each of the trajectory's tokens; none does the first branch's prompt, nor that of a later one.
        positions: list[int | None] = []
        for branch in trajectory.branches:
            prompt, tokens = len(branch.prompt_ids), len(branch.token_ids)
            positions += [None] * (prompt if positions else 0)
            positions += range(start + prompt - 1, start + prompt - 1 + tokens)
            start += prompt + tokens - 1
        for place, reward in trajectory.grade.step_rewards:
            position = positions[place]
            assert position is not None, "no step ends in a prompt"
            assert batch.scored_T[position], "a step ends at a token that the policy sampled"
            rewards_T[position] = rewards_T[position].nan_to_num(0.0) + reward
    return rewards_T
