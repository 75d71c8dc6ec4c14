"""A gradient of 0, or a huge one."""

from __future__ import annotations

from nmoe.config.tables.monitor import GradNormSection
from nmoe.monitor.rule import Metrics, Rule


class GradNormRule(Rule[GradNormSection]):
    name = "grad_norm"
    smoke = True
    source = "training guidelines, early smoke-test criteria: grad_norm non-zero and below 100"
    remedies = (
        "at 0: see that [lora] targets or the learning rate do not freeze every weight",
        "above the limit: lower optimizer.learning_rate",
        "lower algorithm.clip_low and clip_high: extreme log-ratios cause spikes, not advantages",
    )

    def symptom(self, metrics: Metrics) -> str | None:
        norm = metrics.get("grad_norm")
        if norm is None:
            return None
        if norm == 0:
            return "the gradient is 0, so that no weight moves"
        # Turned round, so that a norm that is not a number is beyond the limit.
        return None if norm <= self.settings.above else f"the gradient's norm is {norm:.3g}"
