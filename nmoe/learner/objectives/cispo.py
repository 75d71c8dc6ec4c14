"""CISPO, a policy-gradient loss in which the clipped importance ratio is a constant weight, so that every token keeps its gradient
(MiniMax 2025, arXiv:2506.13585, eq. 4 and 5).

    loss = sum_t w_t * -sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t log pi(x_t)

sg stops the gradient. By default there is no lower bound on r, as in the paper's runs. PPO's `clip` drops every token whose ratio
left the window, rare and important ones among them; CISPO only bounds their weight.
"""

# Shapes: N scored tokens of a micro-batch.

from __future__ import annotations

from torch import Tensor

from nmoe.learner.objectives.base import Objective, Outputs, Scored, log_ratio, need, ratio


def cispo(clip_high: float, clip_low: float = 1.0) -> Objective:
    """Returns the CISPO objective. It needs the columns `advantages`, and `old_logprobs` or `behaviour_logprobs`. Only the gradient
    of the loss has a meaning, not its value."""

    def objective(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        advantages_N = need(scored.advantages_N, "advantages")
        raw_N = log_ratio(outputs, scored).detach()
        ratio_N = ratio(raw_N)
        loss_N = -ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N * outputs.logprobs_N
        return (scored.weights_N * loss_N).sum(), {
            "log_ratio": raw_N,
            "clipped": ((ratio_N > 1 + clip_high) | (ratio_N < 1 - clip_low)).float(),
        }

    return objective
