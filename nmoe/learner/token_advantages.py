"""Advantages per token, over packed sequences: discounted returns, GAE, REINFORCE++, process supervision, a teacher's; divergence
as a reward.

The steps of the decision process are the scored positions: position t reads x[t] and chooses x[t + 1]. Tokens between them, such as
a tool's answer, take no time and earn nothing: discounts count scored positions only. All results are `[T]`, zero at positions that
are not scored. The end of a sequence is terminal, even if the token budget cut it off: the score is that of the sequence as it
stands, and the state after its last token is never computed, so that there is no value to bootstrap from.
"""

# Shapes: T predicting positions of B packed sequences, N scored ones, L scored positions of the longest sequence.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nmoe.config.tables.algorithm import StepBaseline
from nmoe.learner.advantages import EPSILON, group_normalised, others_mean
from nmoe.learner.batch import sequence_of
from nmoe.learner.objectives.base import LOG_RATIO_CLAMP, sequence_sums
from nmoe.learner.objectives.divergence import KLEstimator, kl_estimate


def scored_sums(values_T: Tensor, scored_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """Sum over each sequence's scored positions, `[B]` in fp64."""
    return sequence_sums(values_T[scored_T].double(), sequence_of(lengths)[scored_T], len(lengths))


def terminal_rewards(rewards_B: Tensor, scored_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """Each sequence's reward at its last scored position, `[T]`; dropped if a sequence has none."""
    rewards_T = torch.zeros(len(scored_T), dtype=rewards_B.dtype)
    sequence_T = sequence_of(lengths)
    places_N = scored_T.nonzero().squeeze(-1)
    last_B = torch.full((len(lengths),), -1).scatter_reduce_(0, sequence_T[places_N], places_N, "amax")
    ended_B = last_B >= 0
    rewards_T[last_B[ended_B]] = rewards_B[ended_B]
    return rewards_T


def divergence_rewards(
    logprobs_T: Tensor, reference_logprobs_T: Tensor, scored_T: Tensor, coef: float, estimator: KLEstimator = "k1"
) -> Tensor:
    """The divergence from a reference as a reward, `-coef * KL_t` at every scored position (Ziegler et al. 2019, arXiv:1909.08593,
    eq. 2, which is k1). `logprobs_T` are those of the policy that sampled.

    With k1 the expected gradient of the returns is that of `E[r] - coef * KL(pi || ref)`; as a loss, k1 has no such gradient.
    Estimators per sample add the sequence's sum to its reward: `rewards_B + scored_sums(divergence_rewards(...))`.
    """
    difference_T = (logprobs_T - reference_logprobs_T).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return torch.where(scored_T, -coef * kl_estimate(difference_T, estimator), 0.0)


def teacher_advantages(logprobs_T: Tensor, teacher_logprobs_T: Tensor, scored_T: Tensor, coef: float) -> Tensor:
    """On-policy distillation: `-coef * (log pi(x_t) - log teacher(x_t))` at every scored position, with a discount of 0 (Agarwal et
    al. 2024, arXiv:2306.13649, with reverse KL; as a policy gradient: Lu 2025, "On-policy distillation"). `logprobs_T` are those of
    the policy that sampled.

    In expectation over the sampled token its policy gradient is that of `-coef * KL(pi || teacher)` at each state that the policy
    reached. In imitation, by contrast, the student learns from the states of the teacher.
    """
    return divergence_rewards(logprobs_T, teacher_logprobs_T, scored_T, coef)


def gae(
    token_rewards_T: Tensor,
    values_T: Tensor,
    scored_T: Tensor,
    lengths: Sequence[int],
    gamma: float = 1.0,
    trace_decay: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 11 and 16): with
    `delta_t = r_t + gamma V_(t+1) - V_t`, `A_t = delta_t + gamma lambda A_(t+1)`, both 0 after a sequence's last scored position.

    `values_T` is V of the state before the position's token is drawn, `trace_decay` is lambda. Returns advantages and the critic's
    targets `A_t + V_t`, `[T]` each in fp32. Not whitened: see `whiten`.
    """
    rewards_BL, values_BL = _by_step(token_rewards_T, scored_T, lengths), _by_step(values_T, scored_T, lengths)
    advantages_BL = torch.zeros_like(rewards_BL)
    # After the end of a shorter sequence rewards and values are 0, and so is what they contribute to earlier steps.
    next_value_B = next_advantage_B = torch.zeros(len(lengths), dtype=torch.float64)
    for step in range(rewards_BL.shape[1] - 1, -1, -1):
        delta_B = rewards_BL[:, step] + gamma * next_value_B - values_BL[:, step]
        next_advantage_B = delta_B + gamma * trace_decay * next_advantage_B
        next_value_B = values_BL[:, step]
        advantages_BL[:, step] = next_advantage_B
    advantages_T = _from_steps(advantages_BL, scored_T, lengths)
    return advantages_T, torch.where(scored_T, advantages_T + values_T.float(), 0.0)


def discounted_returns(token_rewards_T: Tensor, scored_T: Tensor, lengths: Sequence[int], gamma: float = 1.0) -> Tensor:
    """`G_t = sum over k >= t of gamma^(k-t) r_k`, `[T]` in fp32: GAE without a critic, at lambda 1."""
    return gae(token_rewards_T, torch.zeros_like(token_rewards_T), scored_T, lengths, gamma, 1.0)[0]


def reinforce_pp(token_rewards_T: Tensor, scored_T: Tensor, lengths: Sequence[int], gamma: float = 1.0) -> Tensor:
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262, section 3): discounted returns, whitened over the scored tokens of the
    batch; no critic and no groups. `token_rewards_T` is `terminal_rewards` plus, where asked for, `divergence_rewards` (k1).

    The variant "with baseline" for several samples of a prompt subtracts the group's mean first:
    `terminal_rewards(dr_grpo(rewards_B, group_ids_B), ...)`.
    """
    return whiten(discounted_returns(token_rewards_T, scored_T, lengths, gamma), scored_T)


def process_supervision(
    step_rewards_T: Tensor,
    group_ids_B: Tensor,
    scored_T: Tensor,
    lengths: Sequence[int],
    baseline: StepBaseline = "none",
) -> Tensor:
    """Advantages from the rewards of steps or turns, `[T]` in fp32: at every scored position the sum of the rewards of the steps
    that end at or after it, the return to go, less a baseline.

    - `none`: no baseline (Williams 1992, REINFORCE). The policy gradient is that of the expected sum of the rewards.
    - `leave_one_out`: less the mean over the other samples of the group of the sum of all their rewards (Kool et al. 2019, "Buy 4
      REINFORCE samples, get a baseline for free"). The same gradient with less noise, if every choice of a sample is a scored
      position, that of the stop token included. A sample that is alone in its group has advantage 0.
    - `normalised`: process supervision of GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.3): instead of a baseline, every
      step's reward is normalised by mean and unbiased deviation of all steps of its group. It has another gradient: one more step
      that is as good as the mean earns 0, so that more good steps are no better than few. A group with a single step has
      advantage 0.

    `step_rewards_T` holds a step's reward at the position that decides on the step's last token, and NaN everywhere else.
    `lengths` are those of samples, `[B]`: the branches of one sample follow one another, and what a later one earns is a return of
    the earlier ones.
    """
    sequence_T = sequence_of(lengths)
    if baseline == "normalised":
        step_rewards_T = group_normalised(step_rewards_T, group_ids_B[sequence_T])
    earned_T = step_rewards_T.double().nan_to_num(0.0)
    parts = [part.flip(0).cumsum(0).flip(0) for part in earned_T.split(list(lengths))]
    returns_T = torch.cat(parts) if parts else earned_T
    if baseline == "leave_one_out":
        others_B = others_mean(sequence_sums(earned_T, sequence_T, len(lengths)), group_ids_B)
        returns_T = (returns_T - others_B[sequence_T]).nan_to_num(0.0)
    return torch.where(scored_T, returns_T, 0.0).float()


def whiten(values_T: Tensor, scored_T: Tensor) -> Tensor:
    """`(x - mean) / (std + 1e-6)` over the scored positions of the batch, population deviation, `[T]` in the type of `values_T`."""
    if not scored_T.any():
        return torch.zeros_like(values_T)
    std, mean = torch.std_mean(values_T[scored_T].double(), correction=0)
    return torch.where(scored_T, (values_T - mean) / (std + EPSILON), 0.0).to(values_T)


def _places(scored_T: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The sequence of every scored position and its step in that sequence, `[N]` each."""
    sequence_N = sequence_of(lengths)[scored_T]
    counts_B = torch.bincount(sequence_N, minlength=len(lengths))
    starts_B = counts_B.cumsum(0) - counts_B
    return sequence_N, torch.arange(len(sequence_N)) - starts_B[sequence_N]


def _by_step(values_T: Tensor, scored_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """Values by sequence and step, `[B, L]` in fp64, padded with 0."""
    sequence_N, step_N = _places(scored_T, lengths)
    longest = int(step_N.max()) + 1 if step_N.numel() else 0
    values_BL = torch.zeros(len(lengths), longest, dtype=torch.float64)
    values_BL[sequence_N, step_N] = values_T[scored_T].double()
    return values_BL


def _from_steps(values_BL: Tensor, scored_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """Inverts `_by_step`, `[T]` in fp32."""
    values_T = torch.zeros(len(scored_T))
    values_T[scored_T] = values_BL[_places(scored_T, lengths)].float()
    return values_T
