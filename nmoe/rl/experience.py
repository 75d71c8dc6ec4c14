"""Experience: the graded groups of a step as one training batch, with everything that loss and critic need of each token."""

# Shapes: B samples, S sequences (the branches of samples), T predicting positions, N scored ones, R rewards of a sample, M largest
# kept set, Y layers, K chosen experts.

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nmoe.config.tables.algorithm import AlgorithmSection, BatchSection, CriticSection
from nmoe.envs.pools.order import stable_hash
from nmoe.learner.advantages import length_penalty, overlong_penalty
from nmoe.learner.batch import Aggregation, Batch, token_weights
from nmoe.learner.correction import correction_weights
from nmoe.learner.token_advantages import divergence_rewards, gae, reinforce_pp, terminal_rewards, whiten
from nmoe.trajectory import Branch, Group, Trajectory


@dataclass(frozen=True)
class Experience:
    """A batch to train on, and the group of each of its sequences.

    advantages: those that metrics describe, before a correction: per sample, or per token where the estimator is
        one over tokens.
    metrics: what was measured while the batch was made.
    """

    batch: Batch
    group_ids_S: Tensor
    advantages: Tensor
    metrics: dict[str, float]

    @property
    def mismatch(self) -> Tensor | None:
        """The learner's log-probability less the sampler's at the same weights, `[N]`, where it was measured before the updates."""
        batch = self.batch
        if batch.old_logprobs_T is None or batch.behaviour_logprobs_T is None:
            return None
        return (batch.old_logprobs_T - batch.behaviour_logprobs_T)[batch.scored_T]


def trained_experience(
    batch: Batch,
    advantages: Tensor,
    groups: Sequence[Group],
    algorithm: AlgorithmSection,
    constant_length: int,
    metrics: dict[str, float],
) -> Experience | None:
    """The part of a batch with advantages that is trained on: without truncated samples where those are masked, and corrected for a
    sampler that differs from the learner. None where every sample was truncated, and those are masked."""
    ids_S = group_ids(groups)[batch.sample_ids()]
    if algorithm.mask_truncated:
        samples = judged(groups)
        ended = [i for i, sample in enumerate(batch.sample_ids().tolist()) if not samples[sample].truncated]
        if not ended:
            return None
        batch, ids_S = selected(batch, ended, algorithm.aggregation, constant_length), ids_S[ended]
    if algorithm.correction != "none":
        batch, corrected = _corrected(batch, algorithm)
        metrics = metrics | corrected
    if (divergence_T := reward_divergence(batch, algorithm)) is not None:
        mean = divergence_T[batch.scored_T].double().mean()
        metrics = metrics | {"reference_kl": float(mean) / -algorithm.kl_coef}
    return Experience(batch, ids_S, advantages, metrics)


def minibatches(
    experience: Experience, sizes: BatchSection, aggregation: Aggregation, constant_length: int, *key: object
) -> Iterator[Batch]:
    """The batch of each optimizer step: the whole of it, or parts of whole groups, in an order that is drawn anew for every pass by
    a hash of `key`."""
    if sizes.updates == 1:
        yield experience.batch
        return
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


def judged(groups: Sequence[Group]) -> list[Trajectory]:
    """The samples of the groups that were judged, in order."""
    return [trajectory for group in groups for trajectory in group.trainable]


def policy_batch(
    trajectories: Sequence[Trajectory], advantages_B: Tensor | None, aggregation: Aggregation, constant_length: int
) -> Batch:
    """One sequence per branch of a trajectory. Only tokens that the policy sampled are scored, stop tokens included; prompts and
    tool results are read but not learned. `advantages_B` holds one advantage per trajectory, for all its branches; without it the
    column is missing."""
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
    """A batch of these sequences alone; the denominators of its weights count only them."""
    part, _ = batch.select(sequences)
    return replace(
        part, weights_T=token_weights(aggregation, part.scored_T, part.lengths, constant_length, part.samples)
    )


def _prefixes(branches: Sequence[Branch]) -> tuple[tuple[int, int], ...]:
    """Branches with the same prompt share all of it, except a branch without tokens, which has not read the prompt's last token."""
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
    """Kept sets `[T, M]`, padded with -1, where sampling truncated the support."""
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


def group_ids(groups: Sequence[Group]) -> Tensor:
    """The index of the group of each judged sample, `[B]`."""
    return torch.tensor([place for place, group in enumerate(groups) for _ in group.trainable], dtype=torch.int64)


def sample_rewards(groups: Sequence[Group], algorithm: AlgorithmSection, token_limit: int) -> tuple[Tensor, Tensor]:
    """Rewards of every judged sample, `[B, R]`, and their weights, `[R]`. A missing reward is NaN.

    Under `multi_reward = "sum"` there is one reward: the grade's score plus the rewards for length. Under "gdpo" each weighted
    component of the rubric and each reward for length is a reward by itself. `token_limit` is the most tokens a sample may have.
    """
    trajectories = judged(groups)
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
    """Rewards for length, `[B]` each, with their weights, as [algorithm] asks for them."""
    tokens_B = torch.tensor([t.sampled_tokens for t in trajectories])
    rewards = []
    if algorithm.overlong_buffer:
        rewards.append((1.0, overlong_penalty(tokens_B, token_limit, algorithm.overlong_buffer)))
    if algorithm.length_penalty:
        correct_B = torch.tensor([t.grade.extras["correctness"] == 1 for t in trajectories])
        rewards.append((algorithm.length_penalty, length_penalty(tokens_B, correct_B, group_ids_B)))
    return rewards


def differs(group: Group, algorithm: AlgorithmSection, token_limit: int) -> bool:
    """Whether rewards, step rewards included, differ within the group. Otherwise all its advantages are zero.

    A divergence from the reference as a reward is not measured yet at this point; it differs between any two samples."""
    if len(group.trainable) < 2:
        return False
    if algorithm.kl_coef > 0 and algorithm.kl_in == "reward":
        return True
    rewards_BR, _ = sample_rewards([group], algorithm, token_limit)
    spread_R = rewards_BR.nan_to_num(-torch.inf).amax(0) - rewards_BR.nan_to_num(torch.inf).amin(0)
    return bool((spread_R > 1e-9).any()) or (algorithm.step_reward_coef > 0 and _steps_differ(group, algorithm))


def _steps_differ(group: Group, algorithm: AlgorithmSection) -> bool:
    """Whether the rewards of steps give any token an advantage. Normalised ones do if they differ; others also if they are alike,
    since samples have different numbers of them, and the tokens of a sample more or fewer ahead."""
    scores = {score for t in group.trainable for _, score in t.grade.step_rewards}
    return len(scores) > 1 if algorithm.step_baseline == "normalised" else bool(scores - {0.0})


def step_rewards(batch: Batch, trajectories: Sequence[Trajectory]) -> Tensor:
    """The rewards of steps, at the position that predicts a step's last token, `[T]`; NaN elsewhere. Several rewards at one
    position, as several verifiers give them, add up."""
    rewards_T = torch.full((batch.tokens,), torch.nan)
    start = 0
    for trajectory in trajectories:
        # The position that predicts each of the trajectory's tokens; none predicts those of a prompt.
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


def reward_divergence(batch: Batch, algorithm: AlgorithmSection) -> Tensor | None:
    """The divergence from the reference as a reward per token, `[T]`, under the policy that sampled; None where it is no reward."""
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


def token_advantages(
    batch: Batch, rewards_B: Tensor, steps_T: Tensor, algorithm: AlgorithmSection, critic: CriticSection | None
) -> tuple[Batch, Tensor]:
    """The batch with the advantages of an estimator over tokens and, under gae, with the critic's targets; and the advantages that
    metrics describe. The reward of a sample comes at the end of its last sequence; what comes after the end of an earlier one
    follows from it."""
    lengths = batch.sample_lengths()
    rewards_T = terminal_rewards(rewards_B, batch.scored_T, lengths)
    rewards_T = rewards_T + algorithm.step_reward_coef * steps_T.nan_to_num(0.0)
    if (divergence_T := reward_divergence(batch, algorithm)) is not None:
        rewards_T = rewards_T + divergence_T
    if algorithm.advantage == "reinforce_pp":
        advantages_T = reinforce_pp(rewards_T, batch.scored_T, lengths)
        return replace(batch, advantages_T=advantages_T), advantages_T[batch.scored_T]
    assert critic is not None, "gae is refused without a critic"
    assert batch.old_values_T is not None, "the critic has given its values"
    raw_T, returns_T = gae(rewards_T, batch.old_values_T, batch.scored_T, lengths, critic.gamma, critic.trace_decay)
    advantages_T = whiten(raw_T, batch.scored_T)
    return replace(batch, advantages_T=advantages_T, returns_T=returns_T), raw_T[batch.scored_T]


def _corrected(batch: Batch, algorithm: AlgorithmSection) -> tuple[Batch, dict[str, float]]:
    """Multiplies the advantages by importance weights for a sampler that differs from the learner. Returns the batch and the
    metrics of the weights."""
    assert batch.old_logprobs_T is not None
    assert batch.behaviour_logprobs_T is not None
    assert batch.advantages_T is not None
    window = algorithm.correction_window
    weights_N, metrics = correction_weights(
        algorithm.correction,
        batch.old_logprobs_T[batch.scored_T],
        batch.behaviour_logprobs_T[batch.scored_T],
        batch.sequence_ids()[batch.scored_T],
        algorithm.correction_cap,
        None if window is None else (window[0], window[1]),
    )
    return replace(batch, advantages_T=batch.advantages_T * batch.column(weights_N)), metrics
