"""Cross-entropy, the objective of pretraining and supervised fine-tuning: `loss = sum_t w_t * -log p(x_t)`."""

from __future__ import annotations

from torch import Tensor

from nmoe.learner.objectives.base import Outputs, Scored


def cross_entropy(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes the weighted negative log-likelihood of the scored tokens in nats; reports no statistics."""
    return -(scored.weights_N * outputs.logprobs_N).sum(), {}
