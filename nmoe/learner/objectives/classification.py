"""Cross-entropy of a classification head's labels and, at unlabelled positions, of the next token: `loss = sum_n w_n * -log
p(label_n)`."""

# Shapes: N scored tokens, K classes.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe.learner.objectives.base import Outputs, Scored, need


def classification(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes the weighted cross-entropy in nats. `labels_N` are class indices, with the head's outputs as logits; at a label of
    -1 the target is the next token instead, as in the joint objective of verifiers (Cobbe et al. 2021, arXiv:2110.14168, section
    4.2). Reports the statistic `label_probability`, of the label or token. Raises ValueError for a label of -1 where the learner
    trains only its head, which computes no vocabulary."""
    logits_NK = need(outputs.head_NK, "head")
    labels_N = need(scored.labels_N, "labels_T").long()
    classes_N = -F.cross_entropy(logits_NK, labels_N.clamp(min=0), reduction="none")
    # Not multiplied by a mask: without a vocabulary the log-probabilities are NaN.
    logprobs_N = torch.where(labels_N >= 0, classes_N, outputs.logprobs_N.to(classes_N))
    if outputs.logprobs_N.requires_grad is False and bool((labels_N < 0).any()):
        raise ValueError("tokens are to be predicted by a learner that trains its head alone")
    return -(scored.weights_N * logprobs_N).sum(), {"label_probability": logprobs_N.detach().exp()}
