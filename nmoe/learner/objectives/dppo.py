"""DPPO: a trust region in probabilities instead of ratios (Qi et al. 2026, arXiv:2602.04879, the binary total variation).

With mu the policy that sampled, r = pi(x) / mu(x):

    M_t = 0 where A > 0 and pi(x_t) - mu(x_t) > clip_high, or A <= 0 and pi(x_t) - mu(x_t) < -clip_low; else 1
    loss = sum_t w_t (-M_t r_t A_t + drift_coef (log r_t)^2)

For a rare token a ratio says little: from 1e-5 to 1e-4 it is 10, and the policy has hardly changed. |pi - mu| at the sampled token
bounds the total variation from below. mu is the sampler and not the learner before the update, because the trust region is around
the sampled distribution. The loss therefore uses `behaviour_logprobs` even if the batch has `old_logprobs`, and needs no further
correction for the mismatch, which is part of r.

The second term is not from the paper. It pulls pi back to mu where the mask removes the gradient (as in prime-rl's default loss,
with 1e-3).
"""

# Shapes: N scored tokens of a micro-batch.

from __future__ import annotations

import torch
from torch import Tensor

from nmoe.learner.objectives.base import LOG_RATIO_CLAMP, Objective, Outputs, Scored, need, ratio


def dppo(clip_low: float, clip_high: float, drift_coef: float = 1e-3) -> Objective:
    """Returns the DPPO objective. It needs the columns `advantages` and `behaviour_logprobs`. The bounds are differences of
    probabilities, not ratios; the paper takes 0.2 or less."""

    def objective(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        advantages_N = need(scored.advantages_N, "advantages")
        behaviour_N = need(scored.behaviour_logprobs_N, "behaviour_logprobs")
        raw_N = outputs.logprobs_N - behaviour_N
        moved_N = outputs.logprobs_N.detach().exp() - behaviour_N.exp()
        masked_N = torch.where(advantages_N > 0, moved_N > clip_high, moved_N < -clip_low)
        drift_N = raw_N.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).square()
        loss_N = torch.where(masked_N, 0.0, -ratio(raw_N) * advantages_N) + drift_coef * drift_N
        return (scored.weights_N * loss_N).sum(), {"log_ratio": raw_N.detach(), "clipped": masked_N.float()}

    return objective
