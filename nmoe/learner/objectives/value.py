"""The value loss of a critic, with PPO's clipping.

    loss = sum_t w_t coef / 2 * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)

V is the head's first output, R the target (`returns`, from `nmoe.rl.advantages.Gae`), V_old the critic before the first update of
the batch. The clipped form follows PPO's published code (Schulman et al. 2017, arXiv:1707.06347; Huang et al. 2022, "The 37
implementation details of PPO", detail 9).
"""

# Shapes: N scored tokens of a micro-batch, K outputs of the head.

from __future__ import annotations

import torch
from torch import Tensor

from nmoe.learner.objectives.base import Objective, Outputs, Scored, need


def value_loss(clip_range: float | None = None, coef: float = 1.0) -> Objective:
    """Returns the value loss of a critic. It needs a learner with a head, the column `returns` and, with a `clip_range`,
    `old_values`. Reports per token `value`, and `value_clipped`: 1 where the clipped error was the larger, else 0."""

    def objective(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        returns_N = need(scored.returns_N, "returns")
        if outputs.head_NK is None:
            raise ValueError("a value loss needs a learner with a head, and this one has none")
        values_N = outputs.head_NK[:, 0]
        error_N = (values_N - returns_N).square()
        clipped_N = torch.zeros_like(error_N)
        if clip_range is not None:
            old_N = need(scored.old_values_N, "old_values")
            bounded_N = old_N + (values_N - old_N).clamp(-clip_range, clip_range)
            bounded_error_N = (bounded_N - returns_N).square()
            clipped_N = (bounded_error_N > error_N).float()
            error_N = torch.maximum(error_N, bounded_error_N)
        loss = coef / 2 * (scored.weights_N * error_N).sum()
        return loss, {"value": values_N.detach(), "value_clipped": clipped_N.detach()}

    return objective


def explained_variance(values_N: Tensor, returns_N: Tensor) -> float:
    """Returns `1 - Var(R - V) / Var(R)`: 1 for a critic that predicts the returns exactly, 0 if it is no better than a constant,
    negative if it is worse. 0 if all returns are equal, since there is nothing to explain."""
    variance = float(returns_N.double().var(correction=0)) if returns_N.numel() else 0.0
    if variance == 0:
        return 0.0
    return 1 - float((returns_N.double() - values_N.double()).var(correction=0)) / variance
