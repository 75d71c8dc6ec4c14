"""Cross-entropy of a process reward model: a head scores each token of a reasoning step, and a step is right if all its tokens
are."""

# Shapes: N scored tokens, J judged tokens, S steps.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe.learner.objectives.base import Outputs, Scored, need

# The least probability, 1e-6, that a step is wrong: of more certain ones the logarithm loses its digits.
_SUREST = -1e-6


def step_logprobs(logits_J2: Tensor, step_J: Tensor, steps: int) -> Tensor:
    """Returns the log-probabilities that each step is wrong and right, `[S, 2]`, from logits per token. A step's probability of
    being right is the product of its tokens' probabilities of class 1, at most 1 - 1e-6. `step_J` is the step of each token, from 0
    to `steps` - 1."""
    token_J = F.log_softmax(logits_J2.float(), dim=-1)[:, 1]
    right_S = token_J.new_zeros(steps).index_add(0, step_J, token_J).clamp(max=_SUREST)
    return torch.stack([torch.log(-torch.expm1(right_S)), right_S], dim=-1)


def step_classification(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes the weighted cross-entropy in nats of the steps' labels, plus the next-token cross-entropy, weighted by `weights_N`:
    a token may count in both. `labels_N` is 0 for a token of a wrong step, 1 for a token of a right step and -1 outside of judged
    steps; no label says which token of a wrong step is at fault. Reports `label_probability`: of the step's label or, outside of
    judged steps, of the token. Raises ValueError if a token has a weight and the learner trains only its head, which computes no
    vocabulary."""
    logits_N2 = need(outputs.head_NK, "head")
    labels_N = need(scored.labels_N, "labels_T").long()
    judged_N = labels_N >= 0
    _, step_J, tokens_S = need(scored.steps_N, "steps_T")[judged_N].unique(return_inverse=True, return_counts=True)
    logprobs_S2 = step_logprobs(logits_N2[judged_N], step_J, len(tokens_S))
    logprobs_J = logprobs_S2[step_J].gather(1, labels_N[judged_N, None]).squeeze(1)
    # Each token of a step brings its share, so that the step counts once.
    share_J = 1 / tokens_S[step_J]
    loss = -(need(scored.label_weights_N, "label_weights_T")[judged_N] * share_J * logprobs_J).sum()
    reported_N = outputs.logprobs_N.detach().to(logprobs_J)
    reported_N = reported_N.masked_scatter(judged_N, logprobs_J.detach())
    if bool((scored.weights_N != 0).any()):
        if not outputs.logprobs_N.requires_grad:
            raise ValueError("tokens are to be predicted by a learner that trains its head alone")
        loss = loss - (scored.weights_N * outputs.logprobs_N).sum()
    return loss, {"label_probability": reported_N.exp()}
