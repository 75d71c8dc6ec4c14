"""The importance ratio that policy losses bound: the policy under training against the one it started the batch from."""

# Shapes: N scored tokens of B sequences.

from __future__ import annotations

import torch
from torch import Tensor

from nmoe.learner.objectives.base import Outputs, Scored, need
from nmoe.learner.objectives.pairs import sequence_sums

# exp(20) is 4.9e8: beyond it a ratio says only that something broke, and fp32 gradients overflow soon after.
LOG_RATIO_CLAMP = 20.0


def log_ratio(outputs: Outputs, scored: Scored) -> Tensor:
    """`log pi(x_t) - log pi_old(x_t)`, `[N]`, with gradient and not yet clamped.

    pi_old is `old_logprobs`, the learner before the first of several updates, where the batch has that column, and else
    `behaviour_logprobs`, the sampler. With the column, what separates the two is left to `nmoe.learner.correction`.
    """
    if scored.old_logprobs_N is not None:
        return outputs.logprobs_N - scored.old_logprobs_N
    return outputs.logprobs_N - need(scored.behaviour_logprobs_N, "behaviour_logprobs")


def ratio(log_ratio_N: Tensor) -> Tensor:
    """`exp` of the log ratio clamped to +-20; beyond the clamp there is no gradient."""
    return log_ratio_N.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()


def sequence_means(values_N: Tensor, sequence_N: Tensor) -> Tensor:
    """Each token's value replaced by the mean over its sequence, `[N]`."""
    sequences = int(sequence_N.max()) + 1 if sequence_N.numel() else 0
    sums_B = sequence_sums(values_N, sequence_N, sequences)
    counts_B = sequence_sums(torch.ones_like(values_N), sequence_N, sequences)
    return (sums_B / counts_B.clamp(min=1))[sequence_N]
