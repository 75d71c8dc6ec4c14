"""A reward that rises while the probe falls."""

from __future__ import annotations

from itertools import pairwise
from statistics import mean

from nmoe.config.tables.monitor import ProbeSection
from nmoe.monitor.rule import Metrics, Rule


class ProbeRule(Rule[ProbeSection]):
    name = "probe"
    source = "training guidelines, overfitting: the OOD probe drops for two evaluations in a row"
    counts_itself = True
    remedies = (
        "take the best checkpoint, which is an earlier one, and end the run",
        "read samples/ for what earns reward without being right",
        "raise algorithm.kl_coef; lower optimizer.learning_rate; use more problems",
    )

    def __init__(self, settings: ProbeSection) -> None:
        super().__init__(settings)
        self._rewards: list[float] = []
        self._probes: list[float] = []

    def symptom(self, metrics: Metrics) -> str | None:
        self._rewards.append(metrics.get("reward_mean", 0.0))
        if "probe" not in metrics:
            return None
        self._probes.append(metrics["probe"])
        last = self._probes[-self.settings.steps - 1 :]
        falls = len(last) > self.settings.steps and all(after < before for before, after in pairwise(last))
        half = len(self._rewards) // 2
        rises = half > 0 and mean(self._rewards[half:]) > mean(self._rewards[:half])
        if not falls or not rises or last[0] - last[-1] < self.settings.drop:
            return None
        return f"held-out problems are solved at {last[-1]:.1%} after {last[0]:.1%}, while the reward rises"
