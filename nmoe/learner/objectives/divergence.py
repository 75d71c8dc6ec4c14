"""A penalty for leaving a reference policy: `loss = sum_t w_t coef * rho_t KL_t`.

KL_t estimates KL(pi || pi_ref) from d = log pi - log pi_ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d
(Schulman 2020, "Approximating KL divergence").

Weighted, which is the default, rho = pi / mu with mu the policy that sampled (DeepSeek-V3.2, arXiv:2512.02556, section 3.1,
"unbiased KL estimate"; TRL's `use_bias_correction_kl`). At tokens that mu drew, the mean of rho times k1 or k3 is KL(pi || pi_ref),
and because the gradient flows through rho too, the mean of its gradient is the gradient of KL(pi || pi_ref), however far mu is
from pi. For k3 that gradient is rho d grad log pi. rho is a constant for k2, whose own gradient d grad log pi is the wanted one
already; its value is another quantity. Weights are of single tokens: the states are still those that mu reached.

Unweighted, rho = 1, the gradient flows through d alone and is right at tokens that pi drew. In expectation, k2 then has the
gradient of KL(pi || pi_ref), and k3 the gradient of KL(pi_ref || pi), which agrees near the reference. k1 has none: as a loss it
measures and does not hold back. As a reward k1 is the right one: `nmoe.rl.advantages.divergence_rewards`.
"""

# Shapes: N scored tokens of a micro-batch.

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from nmoe.learner.objectives.base import LOG_RATIO_CLAMP, Objective, Outputs, Scored, need, ratio

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(difference_N: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimates KL(pi || pi_ref) per token from `log pi - log pi_ref` at tokens drawn from pi."""
    if estimator == "k1":
        return difference_N
    if estimator == "k2":
        return difference_N.square() / 2
    return torch.expm1(-difference_N) + difference_N


def reference_divergence(coef: float, estimator: KLEstimator = "k3", weighted: bool = True) -> Objective:
    """Returns the penalty for leaving the reference policy. It needs the column `reference_logprobs` and, if `weighted`,
    `behaviour_logprobs`. Reports the statistic `reference_kl` per token, importance-weighted if the penalty is."""

    def objective(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        difference_N = outputs.logprobs_N - need(scored.reference_logprobs_N, "reference_logprobs")
        kl_N = kl_estimate(difference_N.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP), estimator)
        if weighted:
            rho_N = ratio(outputs.logprobs_N - need(scored.behaviour_logprobs_N, "behaviour_logprobs"))
            kl_N = (rho_N.detach() if estimator == "k2" else rho_N) * kl_N
        return coef * (scored.weights_N * kl_N).sum(), {"reference_kl": kl_N.detach()}

    return objective
