"""An entropy bonus, `loss = sum_t w_t * -coef * H(pi(. | s_t))` (Mnih et al. 2016, arXiv:1602.01783, section 4).

H is the entropy of the whole sampling distribution (temperature and kept set included), not an estimate from the sampled token.
"""

from __future__ import annotations

from torch import Tensor

from nmoe.learner.objectives.base import Objective, Outputs, Scored


def entropy_bonus(coef: float) -> Objective:
    """Returns an objective that rewards entropy with weight `coef`. It needs no column and reports nothing, because every pass
    reports the entropy."""

    def objective(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        return -coef * (scored.weights_N * outputs.entropy_N).sum(), {}

    return objective
