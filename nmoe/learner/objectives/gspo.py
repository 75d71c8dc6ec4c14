"""GSPO: one importance ratio for a whole sequence (Zheng et al. 2025, arXiv:2507.18071).

    s_i = exp(mean over the sequence's scored tokens of log r_t)                      (eq. 7)
    s_it = sg(s_i) pi(x_t) / sg(pi(x_t))                                              (eq. 14, sg stops the gradient)
    L_t = max(-s_it A_t, -clip(s_it, 1 - clip_low, 1 + clip_high) A_t)                (eq. 13)
    loss = sum_t w_t L_t

The value of s_it is s_i; its gradient is the token's. The objective is a mean over sequences, so the weights need the aggregation
"sequence": with a mean over tokens, long sequences, which have one ratio for all tokens, would count more. The bounds are on a
geometric mean and should be close to 1: the paper takes 3e-4 below and 4e-4 above.
"""

# Shapes: N scored tokens of a micro-batch.

from __future__ import annotations

import torch
from torch import Tensor

from nmoe.learner.objectives.base import Objective, Outputs, Scored, log_ratio, need, ratio, sequence_means


def gspo(clip_low: float, clip_high: float) -> Objective:
    """Returns the GSPO objective. It needs the columns `advantages`, and `old_logprobs` or `behaviour_logprobs`, and the sequence
    of each token (`sequence_N`)."""

    def objective(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        advantages_N = need(scored.advantages_N, "advantages")
        raw_N = log_ratio(outputs, scored)
        sequence_ratio_N = ratio(sequence_means(raw_N.detach(), need(scored.sequence_N, "sequence")))
        ratio_N = sequence_ratio_N * (outputs.logprobs_N - outputs.logprobs_N.detach()).exp()
        plain_N = -ratio_N * advantages_N
        clipped_N = -ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
        loss_N = torch.maximum(plain_N, clipped_N)
        statistics = {"log_ratio": raw_N.detach(), "clipped": (clipped_N > plain_N).float().detach()}
        return (scored.weights_N * loss_N).sum(), statistics

    return objective
