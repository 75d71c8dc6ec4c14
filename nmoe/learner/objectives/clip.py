"""The clipped policy-gradient loss of PPO and GRPO.

With r = pi(x) / pi_old(x) and the advantage A:

    L_t = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)      (Schulman et al. 2017, arXiv:1707.06347, eq. 7;
                                                                   two-sided bounds: DAPO, arXiv:2503.14476, eq. 8)
    L_t = min(L_t, -c A) if A < 0                                 (dual clip: Ye et al. 2019, arXiv:1912.09729, eq. 5)
    loss = sum_t w_t L_t
"""

# Shapes: N scored tokens of a micro-batch.

from __future__ import annotations

import torch
from torch import Tensor

from nmoe.learner.objectives.base import Objective, Outputs, Scored, log_ratio, need, ratio


def clip(clip_low: float, clip_high: float, dual_clip: float | None = None) -> Objective:
    """Returns the clipped policy-gradient objective. It needs the columns `advantages`, and `old_logprobs` or `behaviour_logprobs`.
    `dual_clip` is c > 1; None leaves out the dual clip."""

    def objective(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        advantages_N = need(scored.advantages_N, "advantages")
        raw_N = log_ratio(outputs, scored)
        ratio_N = ratio(raw_N)
        plain_N = -ratio_N * advantages_N
        clipped_N = -ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
        loss_N = torch.maximum(plain_N, clipped_N)
        if dual_clip is not None:
            loss_N = torch.where(advantages_N < 0, torch.minimum(loss_N, -dual_clip * advantages_N), loss_N)
        statistics = {"log_ratio": raw_N.detach(), "clipped": (clipped_N > plain_N).float().detach()}
        return (scored.weights_N * loss_N).sum(), statistics

    return objective
