"""Several objectives as one: a policy loss with its penalties, bonus and critic."""

from __future__ import annotations

import torch
from torch import Tensor

from nmoe.learner.objectives.base import Objective, Outputs, Scored


def total(*objectives: Objective) -> Objective:
    """Losses add up; statistics go side by side, under names that differ."""

    def objective(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        losses: list[Tensor] = []
        statistics: dict[str, Tensor] = {}
        for part in objectives:
            loss, reported = part(outputs, scored)
            losses.append(loss)
            statistics |= reported
        return torch.stack(losses).sum(), statistics

    return objective
