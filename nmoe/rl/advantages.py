"""Advantages: turns the rewards of a step's groups into the factor by which the loss multiplies each token.

Each estimator is one class, whose docstring is its formula. Estimators over samples give all tokens of a sample the same advantage,
to which the advantages of the sample's steps are added. Estimators over tokens (REINFORCE++, GAE) take the rewards of steps, and
the sample's reward at its end, as rewards of tokens. The teacher's advantages and the mask of truncated samples are applied
afterwards; the correction for a sampler that differs from the learner is part of the update (correction.py).

The steps of the decision process are the scored positions, at which the policy sampled: position t reads x[t] and chooses x[t + 1].
Tokens between them, such as a tool's answer, take no time and earn nothing: discounts count scored positions only. Advantages per
token are zero elsewhere. The end of a sequence is terminal, even if the token budget cut it off: the score belongs to the sequence
as it stands, and the state after its last token is never computed, so that there is no value to bootstrap from. Groups may differ
in size. The only sample of a group has advantage 0, except under estimators that normalise over the whole batch (REINFORCE++, GAE,
GDPO), and where steps are rewarded without a baseline.
"""

# Shapes: B samples, each of one group (the samples of one prompt); S sequences (the branches of samples), T predicting positions, N
# scored ones, L scored positions of the longest sequence; R rewards of a sample.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nmoe.config.registry import ADVANTAGES
from nmoe.config.tables.algorithm import AlgorithmSection, CriticSection, StepBaseline
from nmoe.errors import UserError
from nmoe.learner.batch import Batch, sequence_of
from nmoe.learner.objectives.base import LOG_RATIO_CLAMP, need, sequence_sums
from nmoe.learner.objectives.divergence import KLEstimator, kl_estimate
from nmoe.rl.experience import Experience, selected
from nmoe.rl.group_rewards import (
    EPSILON,
    RewardedGroup,
    group_ids,
    group_means,
    group_normalised,
    joined,
    judged,
    others_means,
    step_rewards,
    terminal_rewards,
)
from nmoe.rl.teacher import Teacher


class Advantages:
    """Computes the advantages of a batch of groups, by the estimator and the settings of [algorithm]."""

    def __init__(
        self,
        algorithm: AlgorithmSection,
        constant_length: int,
        critic: CriticSection | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        """Chooses the estimator that `algorithm` names. `constant_length` is the number of tokens that the aggregation "constant"
        divides by. `teacher` adds its advantages. Raises UserError for an unknown estimator."""
        self._algorithm, self._constant_length, self._teacher = algorithm, constant_length, teacher
        self._estimate = estimator(algorithm, critic)

    def __call__(self, batch: Batch, groups: Sequence[RewardedGroup]) -> Experience | None:
        """Returns the batch with advantages, as an `Experience`; None if every sample was truncated and truncated samples are
        masked.

        `batch` has one sequence for each branch of the groups' samples, in order. It needs the reference's log-probabilities where
        the KL penalty is a reward, and the critic's values where there is a critic.
        """
        algorithm, metrics = self._algorithm, dict[str, float]()
        graded = Graded.of(batch, groups, algorithm)
        estimate = self._estimate(graded)
        batch = replace(batch, advantages_T=estimate.advantages_T, returns_T=estimate.returns_T)
        described = estimate.described
        if self._teacher is not None:
            batch, described, metrics = self._teacher.advise(batch)
        ids_S = graded.group_ids_B[batch.sample_ids()]
        if algorithm.mask_truncated:
            samples = judged(groups)
            ended = [i for i, sample in enumerate(batch.sample_ids().tolist()) if not samples[sample].truncated]
            if not ended:
                return None
            batch, ids_S = selected(batch, ended, algorithm.aggregation, self._constant_length), ids_S[ended]
        if (divergence_T := _reward_divergence(batch, algorithm)) is not None:
            mean = divergence_T[batch.scored_T].double().mean()
            metrics["reference_kl"] = float(mean) / -algorithm.kl_coef
        return Experience(batch, ids_S, described, metrics)


@dataclass(frozen=True)
class Graded:
    """The samples of a step with their rewards, the input of an estimator.

    rewards_BR, weights_R: the named rewards of each sample, NaN where it lacks one, and the weight of each name. step_rewards_T: a
    step's reward at the position that predicts the step's last token, NaN elsewhere.
    """

    batch: Batch
    group_ids_B: Tensor
    rewards_BR: Tensor
    weights_R: Tensor
    step_rewards_T: Tensor
    algorithm: AlgorithmSection

    @classmethod
    def of(cls, batch: Batch, groups: Sequence[RewardedGroup], algorithm: AlgorithmSection) -> Graded:
        return cls(batch, group_ids(groups), *joined(groups), step_rewards(batch, judged(groups)), algorithm)

    @property
    def sample_rewards(self) -> Tensor:
        """One reward per sample, `[B]`: the first of its rewards, which is the only one unless the estimator is GDPO. Where the KL
        penalty is a reward, it is added, summed over the sample's tokens."""
        rewards_B, batch = self.rewards_BR[:, 0], self.batch
        if (divergence_T := _reward_divergence(batch, self.algorithm)) is not None:
            scored_T, sequences = batch.scored_T, len(batch.lengths)
            sums_S = sequence_sums(divergence_T[scored_T].double(), batch.sequence_ids()[scored_T], sequences)
            rewards_B = rewards_B + sequence_sums(sums_S, batch.sample_ids(), len(rewards_B)).float()
        return rewards_B

    @property
    def token_rewards(self) -> Tensor:
        """Rewards per token, `[T]`: a sample's reward at its last scored position, step rewards times `step_reward_coef` at the
        ends of steps and, where the KL penalty is a reward, the penalty at every scored position."""
        batch = self.batch
        rewards_T = terminal_rewards(self.rewards_BR[:, 0], batch.scored_T, batch.sample_lengths())
        rewards_T = rewards_T + self.algorithm.step_reward_coef * self.step_rewards_T.nan_to_num(0.0)
        if (divergence_T := _reward_divergence(batch, self.algorithm)) is not None:
            rewards_T = rewards_T + divergence_T
        return rewards_T


@dataclass(frozen=True)
class Estimate:
    """An estimator's result: advantages per token; the advantages that metrics describe, per sample or at scored tokens; and the
    critic's targets, None except under GAE."""

    advantages_T: Tensor
    described: Tensor
    returns_T: Tensor | None = None


Estimator = Callable[[Graded], Estimate]


def estimator(algorithm: AlgorithmSection, critic: CriticSection | None) -> Estimator:
    """Returns the estimator that [algorithm] names: a class below, or the user's function. Raises UserError for an unknown name."""
    if algorithm.multi_reward == "gdpo":
        return Gdpo()
    part = ADVANTAGES.get(algorithm.advantage)
    if algorithm.advantage not in ADVANTAGES.builtin:
        return UserFunction(part)
    if part is Gae:
        assert critic is not None, "gae is refused without a critic"
        return Gae(critic.gamma, critic.trace_decay)
    own: Estimator = part()
    return own


class OverSamples(ABC):
    """The base class of estimators that give all tokens of a sample the same advantage; `of_samples` returns it for each sample,
    `[B]`."""

    @abstractmethod
    def of_samples(self, rewards_B: Tensor, group_ids_B: Tensor) -> Tensor: ...

    def __call__(self, graded: Graded) -> Estimate:
        return _per_token(graded, self.of_samples(graded.sample_rewards, graded.group_ids_B))


class DrGrpo(OverSamples):
    """Dr. GRPO, `r - mean_g` (Liu et al. 2025, arXiv:2503.20783, section 3.2): the group's mean is subtracted, without division by
    the deviation."""

    def of_samples(self, rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
        return (rewards_B - group_means(rewards_B, group_ids_B)).to(rewards_B)


class Grpo(OverSamples):
    """GRPO, `(r - mean_g) / (std_g + 1e-6)` over each group, with the unbiased deviation (Shao et al. 2024, arXiv:2402.03300,
    section 4.1.2)."""

    def of_samples(self, rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
        return group_normalised(rewards_B, group_ids_B).to(rewards_B)


class Rloo(OverSamples):
    """RLOO, `r_i - mean of the others` in the group, a leave-one-out baseline (Ahmadian et al. 2024, arXiv:2402.14740, section
    2.2)."""

    def of_samples(self, rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
        others_B = others_means(rewards_B, group_ids_B)
        return torch.where(others_B.isnan(), 0.0, rewards_B - others_B).to(rewards_B)


class MaxRL(OverSamples):
    """MaxRL, `(r - mean_g) / (mean_g + 1e-6)` over each group (Tajwar et al. 2026, arXiv:2602.02710). With rewards of 0 and 1 it
    follows the gradient of `log P(correct)`, up to the order that the group's size reaches, not of `P(correct)`; rare successes
    count more.

    Raises UserError for a negative reward, with which the mean is not a success rate and could flip the sign of the gradient.
    """

    def of_samples(self, rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
        if rewards_B.numel() and float(rewards_B.min()) < 0:
            raise UserError(
                f"algorithm.advantage = 'maxrl' divides by a group's mean reward, and a reward is {float(rewards_B.min()):g}: "
                "give the rubric rewards of at least 0, or choose another advantage"
            )
        mean_B = group_means(rewards_B, group_ids_B)
        return ((rewards_B - mean_B) / (mean_B + EPSILON)).to(rewards_B)


class UserFunction(OverSamples):
    """Wraps a user's function from rewards and group ids to advantages, `[B]` each."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._function = function

    def of_samples(self, rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
        return self._function(rewards_B, group_ids_B)


class Gdpo:
    """GDPO: several rewards, each normalised separately: `A_k = (r_k - mean_g) / (std_g + 1e-6)` in every group, then `A = sum_k
    w_k A_k`, then `(A - mean) / (std + 1e-6)` over the batch (Liu et al. 2026, arXiv:2601.05242, section 3), with unbiased
    deviations.

    Unlike a normalised weighted sum, it distinguishes combinations of rewards with one sum, and a reward's scale does not decide
    how much it counts. A missing reward (NaN) counts neither in the statistics of its group nor in the sum of the sample. A sample
    without any reward has advantage 0 and does not count in the statistics of the batch.
    """

    def __call__(self, graded: Graded) -> Estimate:
        return _per_token(graded, self.of_rewards(graded.rewards_BR, graded.weights_R, graded.group_ids_B))

    def of_rewards(self, rewards_BR: Tensor, weights_R: Tensor, group_ids_B: Tensor) -> Tensor:
        columns = [group_normalised(rewards_B, group_ids_B) for rewards_B in rewards_BR.unbind(-1)]
        normalised_BR = torch.stack(columns, -1) if columns else rewards_BR.double()
        sums_B = (normalised_BR.nan_to_num(0.0) * weights_R.double()).sum(-1)
        judged_B = ~normalised_BR.isnan().all(-1)
        count = int(judged_B.sum())
        if count < 2:
            return torch.zeros_like(sums_B).to(rewards_BR)
        std, mean = torch.std_mean(sums_B[judged_B])
        return torch.where(judged_B, (sums_B - mean) / (std + EPSILON), 0.0).to(rewards_BR)


class ReinforcePP:
    """REINFORCE++, the return `G_t = sum over k >= t of r_k`, whitened over the scored tokens of the batch; no critic, no groups
    and no discount (Hu et al. 2025, arXiv:2501.03262, section 3)."""

    def __call__(self, graded: Graded) -> Estimate:
        batch = graded.batch
        advantages_T = self.of_tokens(graded.token_rewards, batch.scored_T, batch.sample_lengths())
        return Estimate(advantages_T, advantages_T[batch.scored_T])

    def of_tokens(self, rewards_T: Tensor, scored_T: Tensor, lengths: Sequence[int]) -> Tensor:
        # GAE without a critic, at gamma and lambda 1.
        returns_T, _ = Gae(1.0, 1.0).of_tokens(rewards_T, torch.zeros_like(rewards_T), scored_T, lengths)
        return whiten(returns_T, scored_T)


class Gae:
    """Generalised advantage estimation: `A_t = delta_t + gamma lambda A_(t+1)`, `delta_t = r_t + gamma V_(t+1) - V_t`, with A and V
    0 after a sample's last scored position (Schulman et al. 2016, arXiv:1506.02438, eq. 11 and 16).

    V_t is the critic's value of the state before the position's token is drawn, and `A_t + V_t` its target. The loss gets A
    whitened over the scored tokens of the batch.
    """

    def __init__(self, gamma: float = 1.0, trace_decay: float = 0.95) -> None:
        """Sets the discount `gamma`, and `trace_decay`, which is lambda."""
        self._gamma, self._trace_decay = gamma, trace_decay

    def __call__(self, graded: Graded) -> Estimate:
        batch = graded.batch
        values_T = need(batch.old_values_T, "old_values")
        advantages_T, returns_T = self.of_tokens(graded.token_rewards, values_T, batch.scored_T, batch.sample_lengths())
        return Estimate(whiten(advantages_T, batch.scored_T), advantages_T[batch.scored_T], returns_T)

    def of_tokens(
        self, rewards_T: Tensor, values_T: Tensor, scored_T: Tensor, lengths: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Returns the advantages, not whitened, and the critic's targets, `[T]` each in fp32."""
        counts_B = [int(part.sum()) for part in scored_T.split(list(lengths))]
        rewards_BL, values_BL = (
            pad_sequence(column_T[scored_T].double().split(counts_B), batch_first=True)
            for column_T in (rewards_T, values_T)
        )
        advantages_BL = torch.zeros_like(rewards_BL)
        # After the end of a shorter sample rewards and values are 0, and so is what they contribute to earlier steps.
        next_value_B = next_advantage_B = torch.zeros(len(lengths), dtype=torch.float64)
        for step in range(rewards_BL.shape[1] - 1, -1, -1):
            delta_B = rewards_BL[:, step] + self._gamma * next_value_B - values_BL[:, step]
            next_advantage_B = delta_B + self._gamma * self._trace_decay * next_advantage_B
            next_value_B = values_BL[:, step]
            advantages_BL[:, step] = next_advantage_B
        taken_BL = torch.arange(rewards_BL.shape[1]) < torch.tensor(counts_B).unsqueeze(-1)
        advantages_T = torch.zeros(len(scored_T)).masked_scatter(scored_T, advantages_BL[taken_BL].float())
        return advantages_T, torch.where(scored_T, advantages_T + values_T.float(), 0.0)


def _per_token(graded: Graded, advantages_B: Tensor) -> Estimate:
    """Expands advantages per sample to tokens: each token gets its sample's advantage, plus `step_reward_coef` times the advantages
    of the steps that end at or after it (`process_supervision`)."""
    batch, algorithm, steps_T = graded.batch, graded.algorithm, graded.step_rewards_T
    advantages_T = torch.repeat_interleave(advantages_B[batch.sample_ids()], torch.tensor(batch.lengths))
    if bool(steps_T.isnan().all()):
        return Estimate(advantages_T, advantages_B)
    process_T = process_supervision(
        steps_T, graded.group_ids_B, batch.scored_T, batch.sample_lengths(), algorithm.step_baseline
    )
    advantages_T = advantages_T + algorithm.step_reward_coef * process_T
    return Estimate(advantages_T, advantages_T[batch.scored_T])


def process_supervision(
    step_rewards_T: Tensor,
    group_ids_B: Tensor,
    scored_T: Tensor,
    lengths: Sequence[int],
    baseline: StepBaseline = "none",
) -> Tensor:
    """Computes advantages from the rewards of steps or turns, `[T]` in fp32: at every scored position the return to go (the sum of
    the rewards of the steps that end at or after it), less a baseline.

    - `none`: no baseline (Williams 1992, REINFORCE). Its policy gradient follows the expected sum of the rewards.
    - `leave_one_out`: less the mean, over the other samples of the group, of the sum of a sample's rewards (Kool et al. 2019, "Buy
      4 REINFORCE samples, get a baseline for free"). The same gradient with less noise, if every choice of a sample is a scored
      position, the choice of the stop token included. The only sample of a group has advantage 0.
    - `normalised`: process supervision of GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.3): instead of a baseline, every
      step's reward is normalised by mean and unbiased deviation of all steps of its group. It has another gradient: one more step
      that is as good as the mean earns 0, so that more good steps are no better than few. A group with a single step has
      advantage 0.

    `step_rewards_T` holds a step's reward at the position that predicts the step's last token, and NaN everywhere else. `lengths`
    are the samples' lengths, `[B]`: the branches of one sample follow one another, and rewards of a later branch count in the
    returns of the earlier ones.
    """
    sample_T = sequence_of(lengths)
    if baseline == "normalised":
        step_rewards_T = group_normalised(step_rewards_T, group_ids_B[sample_T])
    earned_T = step_rewards_T.double().nan_to_num(0.0)
    parts = [part.flip(0).cumsum(0).flip(0) for part in earned_T.split(list(lengths))]
    returns_T = torch.cat(parts) if parts else earned_T
    if baseline == "leave_one_out":
        others_B = others_means(sequence_sums(earned_T, sample_T, len(lengths)), group_ids_B)
        returns_T = (returns_T - others_B[sample_T]).nan_to_num(0.0)
    return torch.where(scored_T, returns_T, 0.0).float()


def divergence_rewards(
    logprobs_T: Tensor, reference_logprobs_T: Tensor, scored_T: Tensor, coef: float, estimator: KLEstimator = "k1"
) -> Tensor:
    """Returns the KL penalty for leaving a reference policy as a reward, `-coef * KL_t` at every scored position (Ziegler et al.
    2019, arXiv:1909.08593, eq. 2, which is k1). `logprobs_T` come from the policy that sampled.

    With k1 the returns have the expected gradient of `E[r] - coef * KL(pi || ref)`; as a loss, k1 has no such gradient. Estimators
    over samples add the sum over a sample's tokens to its reward.
    """
    difference_T = (logprobs_T - reference_logprobs_T).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return torch.where(scored_T, -coef * kl_estimate(difference_T, estimator), 0.0)


def _reward_divergence(batch: Batch, algorithm: AlgorithmSection) -> Tensor | None:
    """Returns `divergence_rewards` of a batch, `[T]`; None if the KL penalty is off or part of the loss."""
    if algorithm.kl_coef == 0 or algorithm.kl_in == "loss":
        return None
    behaviour_T = need(batch.behaviour_logprobs_T, "behaviour_logprobs")
    reference_T = need(batch.reference_logprobs_T, "reference_logprobs")
    return divergence_rewards(
        behaviour_T, reference_T, batch.scored_T, algorithm.kl_coef, algorithm.kl_estimator or "k1"
    )


def whiten(values_T: Tensor, scored_T: Tensor) -> Tensor:
    """Normalises values to mean 0 and deviation 1 over the scored positions of the batch, `(x - mean) / (std + 1e-6)` with the
    population deviation: `[T]`, 0 at other positions."""
    if not scored_T.any():
        return torch.zeros_like(values_T)
    std, mean = torch.std_mean(values_T[scored_T].double(), correction=0)
    return torch.where(scored_T, (values_T - mean) / (std + EPSILON), 0.0).to(values_T)
