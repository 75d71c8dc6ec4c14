"""A policy that moves too far at once."""

from __future__ import annotations

from nmoe.config.tables.monitor import KLSection
from nmoe.monitor.rule import Metrics, Rule

# The rule fires at once at an update this many times beyond the limit.
_AT_ONCE = 10


class KLRule(Rule[KLSection]):
    name = "kl"
    source = "training guidelines, tier 2: ppo_kl, large spikes or sustained negative values"
    counts_itself = True
    remedies = (
        "lower optimizer.learning_rate",
        "lower algorithm.clip_low and clip_high",
        "raise algorithm.kl_coef",
    )

    def __init__(self, settings: KLSection) -> None:
        super().__init__(settings)
        self._large = self._negative = 0

    def symptom(self, metrics: Metrics) -> str | None:
        kl = metrics.get("ppo_kl")
        if kl is None:
            return None
        # Inside the updates and after them: the first is about 0 where a step takes one update.
        name, most = max(("ppo_kl", kl), ("update_kl", metrics.get("update_kl", 0.0)), key=lambda one: abs(one[1]))
        self._large = self._large + 1 if abs(most) > self.settings.above else 0
        self._negative = self._negative + 1 if kl < -1e-6 else 0
        # After such an update there may be no next one: every reward is the lowest.
        if name == "update_kl" and most > _AT_ONCE * self.settings.above:
            return f"update_kl is {most:.3g}, in one step beyond {_AT_ONCE} times {self.settings.above:g}"
        if self._large >= self.settings.steps:
            return f"{name} is {most:.3g}, {self._large} steps in a row beyond {self.settings.above:g}"
        if self._negative >= self.settings.negative_steps:
            return f"ppo_kl is negative for {self._negative} steps"
        return None
