"""DRO: a policy-gradient loss that pulls the policy back to the sampler by a quadratic penalty (Richemond et al. 2024,
arXiv:2405.19107; in the form of Kimi k1.5, arXiv:2501.12599, section 2.3.2).

    loss = sum_t w_t -(A log pi(x_t) - beta / 2 (log r_t)^2)
"""

# Shapes: N scored tokens of a micro-batch.

from __future__ import annotations

from torch import Tensor

from nmoe.learner.objectives.base import Objective, Outputs, Scored, log_ratio, need


def dro(beta: float) -> Objective:
    """Returns the DRO objective. It needs the columns `advantages`, and `old_logprobs` or `behaviour_logprobs`."""

    def objective(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        advantages_N = need(scored.advantages_N, "advantages")
        raw_N = log_ratio(outputs, scored)
        loss_N = beta / 2 * raw_N.square() - advantages_N * outputs.logprobs_N
        return (scored.weights_N * loss_N).sum(), {"log_ratio": raw_N.detach()}

    return objective
