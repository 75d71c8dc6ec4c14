r"""Direct preference optimization and related losses. Relative to a reference policy, they raise the likelihood of the preferred
completion y+ above the other, y-.

With h = log pi(y+) / pi_ref(y+) - log pi(y-) / pi_ref(y-), summed over the completions' tokens, b = beta and s = label_smoothing:

    sigmoid       -(1 - s) log sigma(b h) - s log sigma(-b h)
                  DPO (Rafailov et al. 2023, arXiv:2305.18290, eq. 7). With s > 0 a label is taken to be wrong with that
                  probability (Mitchell 2023, "A note on DPO with noisy preferences", eq. 3)
    sigmoid_norm  the same with each log ratio over its completion's number of tokens
                  length-normalised DPO (Lambert et al. 2024, arXiv:2411.15124, section 5.1.2)
    robust        (-(1 - s) log sigma(b h) + s log sigma(-b h)) / (1 - 2 s)
                  unbiased under labels flipped with probability s (Chowdhury et al. 2024, arXiv:2403.00409, section 3.1)
    hinge         max(0, 1 - b h)
                  "hinge-norm" (Liu et al. 2023, arXiv:2309.06657), the hinge of SLiC (Zhao et al. 2023, arXiv:2305.10425)
    ipo           (h' - 1 / (2 b))^2, with h' as in sigmoid_norm
                  IPO (Azar et al. 2023, arXiv:2310.12036, eq. 17, b for tau). The paper takes sums; over them a longer pair is
                  pulled at harder, so that here, as in TRL, log ratios are means over tokens

    loss = sum over pairs of w (L + sft_weight * -log pi(y+) / |y+|)
                  the second term: Pang et al. 2024, arXiv:2404.19733, eq. 1, where |y+| counts the completion alone

The names are TRL's (`loss_type`).
"""

# Shapes: N scored tokens of a micro-batch, B its sequences, P its pairs.

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nmoe.learner.objectives.base import Objective, Outputs, Scored, need, pair_sides, sequence_sums
from nmoe.model.device import put

PreferenceLoss = Literal["sigmoid", "sigmoid_norm", "robust", "hinge", "ipo"]

# Losses over means of log ratios, where the others take sums.
NORMALISED = ("sigmoid_norm", "ipo")


def preference_loss(margin_P: Tensor, loss: PreferenceLoss, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Computes the loss L of each preference pair, `[P]`, from the pair's difference of implicit rewards, b h."""
    if loss == "hinge":
        return F.relu(1 - margin_P)
    if loss == "ipo":
        return (margin_P / beta - 1 / (2 * beta)).square()
    right_P, flipped_P = -F.logsigmoid(margin_P), -F.logsigmoid(-margin_P)
    if loss == "robust":
        return ((1 - label_smoothing) * right_P - label_smoothing * flipped_P) / (1 - 2 * label_smoothing)
    return (1 - label_smoothing) * right_P + label_smoothing * flipped_P


def implicit_rewards(
    logprobs_N: Tensor,
    reference_logprobs_N: Tensor,
    sequence_N: Tensor,
    sequences: int,
    loss: PreferenceLoss,
    beta: float,
) -> Tensor:
    """Returns b log pi(y) / pi_ref(y) of every sequence, `[B]`: the reward under which pi is optimal, up to a term that depends on
    the prompt only (arXiv:2305.18290, eq. 5). For the losses "sigmoid_norm" and "ipo" it is divided by the number of tokens."""
    ratio_B = sequence_sums(logprobs_N - reference_logprobs_N, sequence_N, sequences)
    if loss in NORMALISED:
        ratio_B = ratio_B / sequence_sums(torch.ones_like(logprobs_N), sequence_N, sequences)
    return beta * ratio_B


def dpo(loss: PreferenceLoss, beta: float, label_smoothing: float = 0.0, sft_weight: float = 0.0) -> Objective:
    """Returns the preference objective that `loss` names. It needs preference pairs and the column `reference_logprobs`; the scored
    tokens are the completions of both sides."""

    def objective(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        sequence_N = need(scored.sequence_N, "sequence ids")
        if scored.pairs is None:
            raise ValueError("this objective needs the batch's pairs, which are missing")
        preferred, other = (put(side, sequence_N.device) for side in pair_sides(scored.pairs))
        sequences = len(scored.pairs)
        logprobs_N = outputs.logprobs_N
        reference_N = need(scored.reference_logprobs_N, "reference_logprobs")
        reward_B = implicit_rewards(logprobs_N, reference_N, sequence_N, sequences, loss, beta)
        weight_B = sequence_sums(scored.weights_N, sequence_N, sequences)
        loss_P = preference_loss(reward_B[preferred] - reward_B[other], loss, beta, label_smoothing)
        if sft_weight > 0:
            tokens_B = sequence_sums(torch.ones_like(logprobs_N), sequence_N, sequences)
            mean_B = sequence_sums(logprobs_N, sequence_N, sequences) / tokens_B
            loss_P = loss_P - sft_weight * mean_B[preferred]
        return ((weight_B[preferred] + weight_B[other]) * loss_P).sum(), {}

    return objective
