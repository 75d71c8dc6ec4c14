"""The clipped policy gradient of PPO and GRPO, with an optional penalty for leaving a reference policy.

With r = pi(x) / pi_old(x), the ratio to the policy that sampled:

    L_t = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)      (Schulman et al. 2017, arXiv:1707.06347, eq. 7;
                                                                   two-sided bounds: DAPO, arXiv:2503.14476, eq. 8)
    L_t = min(L_t, -c A) where A < 0                              (dual clip: Ye et al. 2019, arXiv:1912.09729, eq. 5)
    loss = sum_t w_t (L_t + kl_coef * KL_t)

KL_t estimates KL(pi || pi_ref) from d = log pi - log pi_ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d
(Schulman 2020, "Approximating KL divergence"). Its gradient flows through d as written, at tokens that pi drew: that of k2 is the
gradient of KL(pi || pi_ref) in expectation, that of k3 the gradient of KL(pi_ref || pi), which agrees near the reference, and
that of k1 is zero in expectation, so that as a loss k1 measures and does not hold back.
"""

# Shapes: N scored tokens of a micro-batch.

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from nmoe.learner.objectives.base import Objective, Outputs, Scored, need

# exp(20) is 4.9e8: beyond it a ratio says only that something broke, and fp32 gradients overflow soon after.
LOG_RATIO_CLAMP = 20.0

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(difference_N: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of KL(pi || pi_ref) from `log pi - log pi_ref` at tokens drawn from pi."""
    if estimator == "k1":
        return difference_N
    if estimator == "k2":
        return difference_N.square() / 2
    return torch.expm1(-difference_N) + difference_N


def policy_gradient(
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    kl_coef: float = 0.0,
    kl_estimator: KLEstimator = "k3",
) -> Objective:
    """An objective over `advantages`, `behaviour_logprobs` and, with `kl_coef > 0`, `reference_logprobs`."""

    def objective(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        advantages_N = need(scored.advantages_N, "advantages")
        raw_N = outputs.logprobs_N - need(scored.behaviour_logprobs_N, "behaviour_logprobs")
        ratio_N = raw_N.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
        plain_N = -ratio_N * advantages_N
        clipped_N = -ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
        loss_N = torch.maximum(plain_N, clipped_N)
        if dual_clip is not None:
            loss_N = torch.where(advantages_N < 0, torch.minimum(loss_N, -dual_clip * advantages_N), loss_N)
        statistics = {"log_ratio": raw_N.detach(), "clipped": (clipped_N > plain_N).float().detach()}
        if kl_coef > 0:
            difference_N = outputs.logprobs_N - need(scored.reference_logprobs_N, "reference_logprobs")
            kl_N = kl_estimate(difference_N.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP), kl_estimator)
            loss_N = loss_N + kl_coef * kl_N
            statistics["reference_kl"] = kl_N.detach()
        return (scored.weights_N * loss_N).sum(), statistics

    return objective
