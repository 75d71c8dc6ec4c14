"""Advantages per sample: pure functions over rewards and group ids. Groups may be ragged; a group of one has advantage 0, except
where a whole batch is the group.

Advantages per token are in `nmoe.learner.token_advantages`. Penalties for length are added to a sample's score before its advantage
is estimated.
"""

# Shapes: B samples, each of one of several groups (the samples of one prompt); R rewards of a sample.

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nmoe.config.registry import ADVANTAGES
from nmoe.errors import UserError

Advantage = Callable[[Tensor, Tensor], Tensor]

EPSILON = 1e-6


def _group_sums(values_B: Tensor, group_ids_B: Tensor) -> tuple[Tensor, Tensor]:
    """Each sample's group sum and group size, `[B]` each in fp64: under `grpo`, rounding in a mean of equal rewards would be
    divided by a deviation that is rounding too. A value of NaN is absent: neither in the sum nor in the size."""
    _, dense_B = torch.unique(group_ids_B, return_inverse=True)
    groups = int(dense_B.max()) + 1 if dense_B.numel() else 0
    values_B = values_B.double()
    present_B = (~values_B.isnan()).double()
    sums_G = values_B.new_zeros(groups).index_add_(0, dense_B, values_B.nan_to_num(0.0))
    sizes_G = values_B.new_zeros(groups).index_add_(0, dense_B, present_B)
    return sums_G[dense_B], sizes_G[dense_B]


def _group_means(values_B: Tensor, group_ids_B: Tensor) -> Tensor:
    sums_B, sizes_B = _group_sums(values_B, group_ids_B)
    return sums_B / sizes_B


def group_normalised(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """`(r - mean_g) / (std_g + 1e-6)` with the unbiased deviation, `[B]` in fp64. NaN is absent and stays NaN."""
    centred_B = rewards_B - _group_means(rewards_B, group_ids_B)
    squares_B, sizes_B = _group_sums(centred_B.square(), group_ids_B)
    std_B = (squares_B / (sizes_B - 1).clamp(min=1)).sqrt()
    return centred_B / (std_B + EPSILON)


def dr_grpo(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """`r - mean_g` (Liu et al. 2025, arXiv:2503.20783, section 3.2): no division by the deviation."""
    return (rewards_B - _group_means(rewards_B, group_ids_B)).to(rewards_B)


def grpo(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """`(r - mean_g) / (std_g + 1e-6)` with the unbiased deviation (Shao et al. 2024, arXiv:2402.03300, section 4.1.2)."""
    return group_normalised(rewards_B, group_ids_B).to(rewards_B)


def others_mean(values_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """The mean over the other samples of each one's group, `[B]` in fp64: a baseline that the sample itself is not in. NaN for a
    sample that is alone in its group."""
    sums_B, sizes_B = _group_sums(values_B, group_ids_B)
    return torch.where(sizes_B > 1, (sums_B - values_B) / (sizes_B - 1).clamp(min=1), torch.nan)


def rloo(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """`r_i - mean of the others` (Ahmadian et al. 2024, arXiv:2402.14740, section 2.2)."""
    others_B = others_mean(rewards_B, group_ids_B)
    return torch.where(others_B.isnan(), 0.0, rewards_B - others_B).to(rewards_B)


def maxrl(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """`(r - mean_g) / (mean_g + 1e-6)` (Tajwar et al. 2026, arXiv:2602.02710): with rewards of 0 and 1, the gradient of
    `log P(correct)` up to the order that the group's size reaches, instead of that of `P(correct)`; rare successes count more.

    Raises UserError for a negative reward, with which the mean is not a success rate and could flip the sign of the gradient.
    """
    if rewards_B.numel() and float(rewards_B.min()) < 0:
        raise UserError(
            f"algorithm.advantage = 'maxrl' divides by a group's mean reward, and a reward is {float(rewards_B.min()):g}: "
            "give the rubric rewards of at least 0, or choose another advantage"
        )
    mean_B = _group_means(rewards_B, group_ids_B)
    return ((rewards_B - mean_B) / (mean_B + EPSILON)).to(rewards_B)


def gdpo(rewards_BR: Tensor, weights_R: Tensor, group_ids_B: Tensor) -> Tensor:
    """Several rewards, each normalised by itself: `A_k = (r_k - mean_g) / (std_g + 1e-6)` in every group, then `A = sum_k w_k A_k`,
    then `(A - mean) / (std + 1e-6)` over the batch (Liu et al. 2026, arXiv:2601.05242, section 3), unbiased deviations.

    Unlike a normalised weighted sum, it keeps apart combinations of rewards that have the same sum, and a reward's scale does not
    decide how much it counts. A reward of NaN is absent: it counts neither in the statistics of its group nor in the sum
    of the sample. A sample without any reward has advantage 0 and does not count in the statistics of the batch.
    """
    columns = [group_normalised(rewards_B, group_ids_B) for rewards_B in rewards_BR.unbind(-1)]
    normalised_BR = torch.stack(columns, -1) if columns else rewards_BR.double()
    sums_B = (normalised_BR.nan_to_num(0.0) * weights_R.double()).sum(-1)
    judged_B = ~normalised_BR.isnan().all(-1)
    count = int(judged_B.sum())
    if count < 2:
        return torch.zeros_like(sums_B).to(rewards_BR)
    std, mean = torch.std_mean(sums_B[judged_B])
    return torch.where(judged_B, (sums_B - mean) / (std + EPSILON), 0.0).to(rewards_BR)


def advantage(name: str) -> Advantage:
    """The estimator that `[algorithm] advantage` names: one of the functions above, or one of the user's.

    Raises UserError for a name without a function.
    """
    estimator: Advantage = ADVANTAGES.get(name)
    return estimator


def overlong_penalty(tokens_B: Tensor, max_tokens: int, buffer_tokens: int) -> Tensor:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, eq. 13), `[B]` between 0 and -1: nothing up to
    `max_tokens - buffer_tokens` sampled tokens, then down in a straight line to -1 at `max_tokens`.

    With a single penalty at the limit, nothing tells the policy that length was the reason; the slope does.
    """
    over_B = tokens_B.double() - (max_tokens - buffer_tokens)
    return (-over_B / buffer_tokens).clamp(-1.0, 0.0).float()


def length_penalty(tokens_B: Tensor, correct_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """Kimi k1.5's length reward (arXiv:2501.12599, section 2.3.3), `[B]`: with `l = 0.5 - (n - min_g) / (max_g - min_g)` over the
    sampled tokens n of a group, `l` for a correct answer and `min(0, l)` for a wrong one; 0 where a group's lengths are all alike.
    """
    _, dense_B = torch.unique(group_ids_B, return_inverse=True)
    groups = int(dense_B.max()) + 1 if dense_B.numel() else 0
    tokens_B = tokens_B.double()
    extremes = [
        tokens_B.new_zeros(groups).scatter_reduce_(0, dense_B, tokens_B, how, include_self=False)[dense_B]
        for how in ("amin", "amax")
    ]
    spread_B = extremes[1] - extremes[0]
    share_B = 0.5 - (tokens_B - extremes[0]) / spread_B.clamp(min=1)
    share_B = torch.where(correct_B.bool(), share_B, share_B.clamp(max=0.0))
    return torch.where(spread_B > 0, share_B, 0.0).float()
