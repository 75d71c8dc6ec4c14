"""An engine whose log-probabilities are not the learner's."""

from __future__ import annotations

from nmoe.config.tables.monitor import MismatchSection
from nmoe.monitor.rule import Metrics, Recent, Rule


class MismatchRule(Rule[MismatchSection]):
    name = "mismatch"
    source = "Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
    remedies = (
        'set [model] numerics = "exact"',
        'correct for it: algorithm.correction = "tis"',
        "look at route_flips and at what top-p and top-k keep",
    )

    def __init__(self, settings: MismatchSection, half_precision: bool = False) -> None:
        super().__init__(settings)
        self._above = settings.above or (0.02 if half_precision else 1e-6)
        self._start = Recent(5)

    def symptom(self, metrics: Metrics) -> str | None:
        mean = metrics.get("mismatch_abs_mean")
        if mean is None:
            return None
        start = self._start.mean(mean)
        if mean > self._above:
            return f"engine and learner differ by {mean:.2g} a token"
        # Far below the limit a difference is rounding, which comes and goes.
        if start is None or mean <= max(self.settings.growth * start, self._above / 4):
            return None
        return f"engine and learner differ by {mean:.2g} a token, and began at {start:.2g}"
