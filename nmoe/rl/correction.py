"""Corrects a policy loss for a sampler whose probabilities differ from the learner's, because of numerical differences or of older
weights.

With `rho_t = pi_old(x_t) / mu(x_t)`, where pi_old is the learner before the first update of a batch and mu the sampler, each
token's policy loss is multiplied by

    none            1
    tis             min(rho, cap), cap 2: truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly
                    brings you off-policy RL training")
    mask            rho where low <= rho <= high, else 0; 0.5 to 2: IcePop (Ling team 2025, arXiv:2510.18855)
    sequence_mask   min(rho, cap) where low <= exp(mean over the sequence of log rho) <= high, else 0: the geometric mean
                    (Liu et al. 2025, "When speed kills stability"; 0.99 to 1.01), whole sequences at a time

Weights carry no gradient. Every policy loss here is linear in its advantage for factors >= 0 (`max(-r A, -clip(r) A)` times w is
the same of w A), so the weights go into the advantages, `advantages * weights`, and leave penalties for entropy and divergence as
they are. The denominator does not change: a masked token counts as a token. `benchmarks/unbiasedness.py` measures how much bias
each of them leaves.

With a single update per batch, pi_old is what the update's own pass computes, and no other pass is needed.
"""

# Shapes: N scored tokens.

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from nmoe.config.tables.algorithm import AlgorithmSection
from nmoe.learner.objectives import Objective, Outputs, Scored
from nmoe.learner.objectives.base import LOG_RATIO_CLAMP, need, sequence_means

Correction = Literal["none", "tis", "mask", "sequence_mask"]


@dataclass(frozen=True)
class Weights:
    """The factors of tokens' losses, in float64, with the ratios that they come from and where these were capped or masked."""

    weights_N: Tensor
    rho_N: Tensor
    capped_N: Tensor
    kept_N: Tensor

    def weigh(self, advantages_N: Tensor) -> Tensor:
        """Multiplies advantages by the weights."""
        return advantages_N * self.weights_N.to(advantages_N)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics whose names begin with `correction_` (docs/reference/metrics.md). `correction_ess` is
        `(sum rho)^2 / (N sum rho^2)`."""
        tokens = max(1, self.rho_N.numel())
        effective = self.rho_N.sum().square() / (tokens * self.rho_N.square().sum()).clamp(min=1e-300)
        return {
            "correction_ess": float(effective),
            "correction_clipped": float(self.capped_N.sum()) / tokens,
            "correction_masked": float((~self.kept_N).sum()) / tokens,
            "correction_mean": float(self.weights_N.sum()) / tokens,
        }


def correction_weights(
    correction: Correction,
    old_logprobs_N: Tensor,
    behaviour_logprobs_N: Tensor,
    sequence_N: Tensor,
    cap: float = 2.0,
    window: tuple[float, float] | None = None,
) -> Weights:
    """Computes the importance weights of tokens. `sequence_N` is the sequence of each. `window` bounds the ratio of `mask` (default
    0.5 to 2) or the geometric mean of `sequence_mask` (default 0.99 to 1.01)."""
    log_N = (old_logprobs_N.double() - behaviour_logprobs_N.double()).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    rho_N = log_N.exp()
    kept_N = torch.ones_like(rho_N, dtype=torch.bool)
    capped_N = torch.zeros_like(kept_N)
    if correction == "mask":
        low, high = window or (0.5, 2.0)
        kept_N = (rho_N >= low) & (rho_N <= high)
    elif correction == "sequence_mask":
        low, high = window or (0.99, 1.01)
        geometric_N = sequence_means(log_N, sequence_N).exp()
        kept_N = (geometric_N >= low) & (geometric_N <= high)
    if correction in ("tis", "sequence_mask"):
        capped_N = rho_N > cap
    weights_N = torch.ones_like(rho_N) if correction == "none" else rho_N
    weights_N = torch.where(kept_N, weights_N.masked_fill(capped_N, cap), 0.0)
    return Weights(weights_N, rho_N, capped_N, kept_N)


def weights_by(
    algorithm: AlgorithmSection, old_logprobs_N: Tensor, behaviour_logprobs_N: Tensor, sequence_N: Tensor
) -> Weights:
    """Computes the weights by the settings of [algorithm]."""
    window = algorithm.correction_window
    bounds = None if window is None else (window[0], window[1])
    cap = algorithm.correction_cap
    return correction_weights(algorithm.correction, old_logprobs_N, behaviour_logprobs_N, sequence_N, cap, bounds)


def with_correction(objective: Objective, algorithm: AlgorithmSection) -> Objective:
    """Wraps a policy's objective so that advantages are weighed as [algorithm] says. Ratios are to the batch's `old_logprobs`, or
    where it has none, to the pass's own log-probabilities, detached."""
    if algorithm.correction == "none":
        return objective

    def weighed(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        old_N = outputs.logprobs_N.detach() if scored.old_logprobs_N is None else scored.old_logprobs_N
        behaviour_N = need(scored.behaviour_logprobs_N, "behaviour_logprobs")
        weights = weights_by(algorithm, old_N, behaviour_N, need(scored.sequence_N, "sequence"))
        advantages_N = weights.weigh(need(scored.advantages_N, "advantages"))
        return objective(outputs, replace(scored, old_logprobs_N=old_N, advantages_N=advantages_N))

    return weighed
