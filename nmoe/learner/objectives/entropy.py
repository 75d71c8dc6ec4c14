"""An entropy bonus, `loss = sum_t w_t * -coef * H(pi(. | s_t))` (Mnih et al. 2016, arXiv:1602.01783, section 4).

H is that of the whole distribution that is sampled from (temperature and kept set included), not an estimate from the token drawn.
"""

from __future__ import annotations

from torch import Tensor

from nmoe.learner.objectives.base import Objective, Outputs, Scored


def entropy_bonus(coef: float) -> Objective:
    """Needs no column. The entropy itself is among every pass's statistics."""

    def objective(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        return -coef * (scored.weights_N * outputs.entropy_N).sum(), {}

    return objective
