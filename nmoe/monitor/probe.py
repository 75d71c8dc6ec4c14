"""Held-out problems that are solved less than before."""

from __future__ import annotations

from statistics import mean

from nmoe.config.tables.monitor import ProbeSection
from nmoe.monitor.rule import Metrics, Rule


class ProbeRule(Rule[ProbeSection]):
    name = "probe"
    source = "training guidelines, overfitting: the OOD probe is worse for two evaluations in a row"
    counts_itself = True
    remedies = (
        "take the best checkpoint, which is an earlier one, and end the run",
        "read samples/ for what earns reward without being right",
        "raise algorithm.kl_coef; lower optimizer.learning_rate; use more problems",
    )

    def __init__(self, settings: ProbeSection) -> None:
        super().__init__(settings)
        self._rewards: list[float] = []
        self._lost = 0

    def symptom(self, metrics: Metrics) -> str | None:
        if "reward_mean" in metrics:
            self._rewards.append(metrics["reward_mean"])
        if "probe" not in metrics:
            return None
        lost = metrics.get("probe_before", metrics["probe"]) - metrics["probe"]
        self._lost = self._lost + 1 if "probe_before" in metrics and lost >= self.settings.drop else 0
        if self._lost < self.settings.steps:
            return None
        half = len(self._rewards) // 2
        rises = half > 0 and mean(self._rewards[half:]) > mean(self._rewards[:half])
        now, before = metrics["probe"], metrics["probe_before"]
        # The negative of a loss: a share of problems is not below 0.
        worse = (
            f"the held-out loss is {-now:.4f} after {-before:.4f}"
            if now < 0
            else f"held-out problems are solved at {now:.1%} after {before:.1%}"
        )
        return (
            f"{worse}, which is more than chance"
            + (f", {self._lost} evaluations in a row" if self._lost > 1 else "")
            + (", while the reward rises" if rises else "")
        )
