"""Rewards without a difference."""

from __future__ import annotations

from nmoe.config.tables.monitor import RewardStuckSection
from nmoe.monitor.rule import Metrics, Rule


class RewardStuckRule(Rule[RewardStuckSection]):
    name = "reward_stuck"
    smoke = True
    source = (
        "training guidelines, early smoke-test criteria: reward_mean not stuck at 0 or 1, advantage_std not stuck at 0"
    )
    remedies = (
        "at the lowest reward: read samples/, and grade a right answer with `nmoe env check`",
        "then take easier problems, or a larger batch.group_size",
        "at the highest: the problems are solved; take harder ones",
    )

    def symptom(self, metrics: Metrics) -> str | None:
        spread, mean = metrics.get("advantage_std", metrics.get("reward_std")), metrics.get("reward_mean")
        if mean is None or (not metrics.get("skipped") and spread != 0):
            return None
        return f"all rewards of a group are alike (mean {mean:.3g}), so that nothing can be learned"
