"""CISPO: the ratio is clipped as a weight, and every token keeps its gradient (MiniMax 2025, arXiv:2506.13585, eq. 4 and 5).

    loss = sum_t w_t * -sg(min(r_t, 1 + clip_high)) A_t log pi(x_t)

Without a lower bound on r, as in the paper's runs. Where `clip` drops a token whose ratio left the window, rare ones that matter
among them, this one only bounds how much it counts.
"""

# Shapes: N scored tokens of a micro-batch.

from __future__ import annotations

from torch import Tensor

from nmoe.learner.objectives.base import Objective, Outputs, Scored, log_ratio, need, ratio


def cispo(clip_high: float) -> Objective:
    """Needs `advantages` and `old_logprobs` or `behaviour_logprobs`. The loss's value means nothing, its gradient does."""

    def objective(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        advantages_N = need(scored.advantages_N, "advantages")
        raw_N = log_ratio(outputs, scored).detach()
        ratio_N = ratio(raw_N)
        loss_N = -ratio_N.clamp(max=1 + clip_high) * advantages_N * outputs.logprobs_N
        return (scored.weights_N * loss_N).sum(), {
            "log_ratio": raw_N,
            "clipped": (ratio_N > 1 + clip_high).float(),
        }

    return objective
