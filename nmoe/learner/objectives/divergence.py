"""A penalty for leaving a reference policy: `loss = sum_t w_t coef * KL_t`.

KL_t estimates KL(pi || pi_ref) from d = log pi - log pi_ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d
(Schulman 2020, "Approximating KL divergence"). Its gradient flows through d as written, at tokens that pi drew: that of k2 is the
gradient of KL(pi || pi_ref) in expectation, that of k3 the gradient of KL(pi_ref || pi), which agrees near the reference, and
that of k1 is zero in expectation, so that as a loss k1 measures and does not hold back. As a reward k1 is the right one:
`nmoe.learner.token_advantages.divergence_rewards`.
"""

# Shapes: N scored tokens of a micro-batch.

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from nmoe.learner.objectives.base import Objective, Outputs, Scored, need
from nmoe.learner.objectives.importance import LOG_RATIO_CLAMP

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(difference_N: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of KL(pi || pi_ref) from `log pi - log pi_ref` at tokens drawn from pi."""
    if estimator == "k1":
        return difference_N
    if estimator == "k2":
        return difference_N.square() / 2
    return torch.expm1(-difference_N) + difference_N


def reference_divergence(coef: float, estimator: KLEstimator = "k3") -> Objective:
    """Needs `reference_logprobs`. Reports `reference_kl` per token."""

    def objective(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        difference_N = outputs.logprobs_N - need(scored.reference_logprobs_N, "reference_logprobs")
        kl_N = kl_estimate(difference_N.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP), estimator)
        return coef * (scored.weights_N * kl_N).sum(), {"reference_kl": kl_N.detach()}

    return objective
