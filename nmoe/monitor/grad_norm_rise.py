"""Ever larger gradients."""

from __future__ import annotations

from itertools import pairwise

from nmoe.config.tables.monitor import GradNormRiseSection
from nmoe.monitor.rule import Metrics, Rule


class GradNormRiseRule(Rule[GradNormRiseSection]):
    name = "grad_norm_rise"
    source = "training guidelines, overfitting: the maximum of grad_norm per ten steps rises"
    counts_itself = True
    remedies = (
        "lower optimizer.learning_rate",
        "lower algorithm.clip_low and clip_high",
        "go back to the checkpoint before the rise",
    )

    def __init__(self, settings: GradNormRiseSection) -> None:
        super().__init__(settings)
        self._stretch: list[float] = []
        self._highest: list[float] = []

    def symptom(self, metrics: Metrics) -> str | None:
        if "grad_norm" not in metrics:
            return None
        self._stretch.append(metrics["grad_norm"])
        if len(self._stretch) < self.settings.steps:
            return None
        self._highest.append(max(self._stretch))
        self._stretch = []
        last = self._highest[-self.settings.stretches :]
        if len(last) < self.settings.stretches or any(after <= before for before, after in pairwise(last)):
            return None
        if last[-1] <= self.settings.factor * last[0]:
            return None
        return f"the highest norm of {self.settings.steps} steps rose from {last[0]:.3g} to {last[-1]:.3g}"
