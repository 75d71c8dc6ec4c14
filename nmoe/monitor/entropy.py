"""Samples that become alike while problems are still unsolved."""

from __future__ import annotations

from nmoe.config.tables.monitor import EntropySection
from nmoe.monitor.rule import Metrics, Recent, Rule


class EntropyRule(Rule[EntropySection]):
    name = "entropy"
    source = "training guidelines, tier 2: entropy_mean, diversity collapse"
    remedies = (
        "lower optimizer.learning_rate",
        "raise algorithm.kl_coef, or set algorithm.entropy_coef",
        "raise sampling.temperature",
    )

    def __init__(self, settings: EntropySection) -> None:
        super().__init__(settings)
        self._start = Recent(5)

    def symptom(self, metrics: Metrics) -> str | None:
        entropy, solved = metrics.get("entropy_mean"), metrics.get("correctness", 0.0)
        if entropy is None or (start := self._start.mean(entropy)) is None or solved >= self.settings.solved:
            return None
        if entropy >= self.settings.share * start:
            return None
        return f"the entropy is {entropy:.3g} and began at {start:.3g}, with {solved:.0%} solved"
