"""A policy that is far from its reference."""

from __future__ import annotations

from nmoe.config.tables.monitor import ReferenceSection
from nmoe.monitor.rule import Metrics, Rule


class ReferenceRule(Rule[ReferenceSection]):
    name = "reference"
    source = "training guidelines, tier 2: ppo_kl from the reference policy; tails: log_ratio_raw_max of policy against reference"
    remedies = (
        "compare correctness with that of the first steps: where it fell, go back to a checkpoint before",
        "lower optimizer.learning_rate",
        "raise algorithm.kl_coef",
    )

    def symptom(self, metrics: Metrics) -> str | None:
        kl = metrics.get("reference_kl", 0.0)
        if kl > self.settings.above:
            return f"the policy is {kl:.3g} nats a token from its reference"
        tail = metrics.get("reference_log_ratio_abs_p99", 0.0)
        if tail > self.settings.log_ratio:
            return f"one token in a hundred is {tail:.3g} in log-probability from the reference"
        return None
