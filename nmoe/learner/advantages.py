"""Advantage estimators: pure functions over rewards and group ids. Groups may be ragged; a group of one has advantage 0."""

# Shapes: B samples; each belongs to one of several groups (the samples of one prompt).

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Advantage = Callable[[Tensor, Tensor], Tensor]


def _group_sums(values_B: Tensor, group_ids_B: Tensor) -> tuple[Tensor, Tensor]:
    """Each sample's group sum and group size, `[B]` each in fp64: under `grpo`, rounding in a mean of equal rewards would be
    divided by a deviation that is rounding too."""
    _, dense_B = torch.unique(group_ids_B, return_inverse=True)
    groups = int(dense_B.max()) + 1 if dense_B.numel() else 0
    values_B = values_B.double()
    sums_G = values_B.new_zeros(groups).index_add_(0, dense_B, values_B)
    sizes_G = values_B.new_zeros(groups).index_add_(0, dense_B, torch.ones_like(values_B))
    return sums_G[dense_B], sizes_G[dense_B]


def _centred(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    sums_B, sizes_B = _group_sums(rewards_B, group_ids_B)
    return rewards_B - sums_B / sizes_B


def dr_grpo(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """`r - mean_g` (Liu et al. 2025, arXiv:2503.20783, section 3.2): no division by the deviation."""
    return _centred(rewards_B, group_ids_B).to(rewards_B)


def grpo(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """`(r - mean_g) / (std_g + 1e-6)` with the unbiased deviation (Shao et al. 2024, arXiv:2402.03300, section 4.1.2)."""
    centred_B = _centred(rewards_B, group_ids_B)
    squares_B, sizes_B = _group_sums(centred_B.square(), group_ids_B)
    std_B = (squares_B / (sizes_B - 1).clamp(min=1)).sqrt()
    return (centred_B / (std_B + 1e-6)).to(rewards_B)


def rloo(rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """`r_i - mean of the others` (Ahmadian et al. 2024, arXiv:2402.14740, section 2.2)."""
    sums_B, sizes_B = _group_sums(rewards_B, group_ids_B)
    others_B = (sums_B - rewards_B) / (sizes_B - 1).clamp(min=1)
    return torch.where(sizes_B > 1, rewards_B - others_B, 0.0).to(rewards_B)


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
