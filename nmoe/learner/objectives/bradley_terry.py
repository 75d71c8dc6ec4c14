"""The Bradley-Terry loss of a reward model: it raises the preferred answer's reward r+ above the other's, r-.

    L = -log sigma(r+ - r-)                    (Bradley and Terry 1952; for answers Ouyang et al. 2022, arXiv:2203.02155, eq. 1)
    L = -log sigma(r+ - r- - m)                margin m between answers (Touvron et al. 2023, arXiv:2307.09288, eq. 2)
    loss = sum over pairs of w (L + c (r+ + r-)^2)

The last term, of weight c, keeps the mean of the rewards near 0, which differences do not determine (Eisenstein et al. 2023,
arXiv:2312.09244, section 2). TRL has margin and this term in its RewardTrainer.
"""

# Shapes: N scored tokens of a micro-batch (the last of each sequence), B its sequences, P its pairs.

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from nmoe.learner.objectives.base import Objective, Outputs, Scored, need, pair_sides, sequence_sums
from nmoe.model.device import put


def bradley_terry(margin: float = 0.0, centering: float = 0.0) -> Objective:
    """Returns the objective with margin m and `centering` c. It needs preference pairs, and a head with one output, read at the one
    scored position of each sequence. Reports the statistic `reward`."""

    def objective(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        sequence_N, head_NK = need(scored.sequence_N, "sequence ids"), need(outputs.head_NK, "head outputs")
        if scored.pairs is None:
            raise ValueError("this objective needs the batch's pairs, which are missing")
        preferred, other = (put(side, sequence_N.device) for side in pair_sides(scored.pairs))
        sequences = len(scored.pairs)
        if sequence_N.bincount(minlength=sequences).ne(1).any():
            raise ValueError("a reward is read at one position of every sequence, its last")
        reward_B = sequence_sums(head_NK[:, 0], sequence_N, sequences)
        weight_B = sequence_sums(scored.weights_N, sequence_N, sequences)
        loss_P = -F.logsigmoid(reward_B[preferred] - reward_B[other] - margin)
        if centering > 0:
            loss_P = loss_P + centering * (reward_B[preferred] + reward_B[other]).square()
        total = ((weight_B[preferred] + weight_B[other]) * loss_P).sum()
        return total, {"reward": head_NK[:, 0].detach()}

    return objective
