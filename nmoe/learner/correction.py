"""Corrections for a sampler whose probabilities differ from the learner's, by numerical mismatch or older weights.

With `rho_t = pi_old(x_t) / mu(x_t)`, the learner before the first update of a batch against the sampler, each token's policy
loss is multiplied by

    none            1
    tis             min(rho, cap)                                truncated importance sampling (Yao et al. 2025, "Your efficient RL
                                                                 framework secretly brings you off-policy RL training"; cap 2)
    mask            rho where low <= rho <= high, else 0         IcePop (Ling team 2025, arXiv:2510.18855; 0.5 to 2)
    sequence_mask   min(rho, cap) where low <= exp(mean over the sequence of log rho) <= high, else 0: the geometric mean
                    (Liu et al. 2025, "When speed kills stability"; 0.99 to 1.01), whole sequences at a time

Weights are fixed once per batch and carry no gradient. Every policy loss here is linear in its advantage for factors >= 0
(`max(-r A, -clip(r) A)` times w is the same of w A), so the weights go into the advantages, `advantages * weights`, and leave
penalties for entropy and divergence alone. The denominator does not change: a masked token counts as a token.

`benchmarks/unbiasedness.py` measures how much bias each of them leaves.
"""

# Shapes: N scored tokens of a batch of B sequences.

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from nmoe.learner.objectives.base import LOG_RATIO_CLAMP, sequence_means

Correction = Literal["none", "tis", "mask", "sequence_mask"]

TIS_CAP = 2.0
TOKEN_WINDOW = (0.5, 2.0)
SEQUENCE_WINDOW = (0.99, 1.01)


def correction_weights(
    correction: Correction,
    old_logprobs_N: Tensor,
    behaviour_logprobs_N: Tensor,
    sequence_N: Tensor,
    cap: float = TIS_CAP,
    window: tuple[float, float] | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Computes weights per token, `[N]`, and statistics of the batch:

    - `correction_ess`: effective sample size of the uncorrected `rho`, `(sum rho)^2 / (N sum rho^2)`, a share of the tokens;
    - `correction_clipped`: share of tokens above the cap (0 where nothing is capped);
    - `correction_masked`: share of tokens with weight 0;
    - `correction_mean`: mean weight, 1 where sampler and learner agree.

    `sequence_N` says which sequence a token belongs to. `window` bounds the ratio of `mask` (default 0.5 to 2) or the geometric
    mean of `sequence_mask` (default 0.99 to 1.01).
    """
    log_N = (old_logprobs_N.double() - behaviour_logprobs_N.double()).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    rho_N = log_N.exp()
    kept_N = torch.ones_like(rho_N, dtype=torch.bool)
    capped_N = torch.zeros_like(kept_N)
    if correction == "mask":
        low, high = window or TOKEN_WINDOW
        kept_N = (rho_N >= low) & (rho_N <= high)
    elif correction == "sequence_mask":
        low, high = window or SEQUENCE_WINDOW
        geometric_N = sequence_means(log_N, sequence_N).exp()
        kept_N = (geometric_N >= low) & (geometric_N <= high)
    if correction in ("tis", "sequence_mask"):
        capped_N = rho_N > cap
    weights_N = torch.ones_like(rho_N) if correction == "none" else rho_N
    weights_N = torch.where(kept_N, weights_N.masked_fill(capped_N, cap), 0.0)
    tokens = max(1, rho_N.numel())
    statistics = {
        "correction_ess": float(rho_N.sum().square() / (tokens * rho_N.square().sum()).clamp(min=1e-300)),
        "correction_clipped": float(capped_N.sum()) / tokens,
        "correction_masked": float((~kept_N).sum()) / tokens,
        "correction_mean": float(weights_N.sum()) / tokens,
    }
    return weights_N.to(old_logprobs_N), statistics
