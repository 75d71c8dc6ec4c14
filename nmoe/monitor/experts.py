"""Collapsing experts."""

from __future__ import annotations

from nmoe.config.tables.monitor import ExpertsSection
from nmoe.monitor.rule import Metrics, Rule

_VIOLATION = "expert_load_max_violation/"


class ExpertsRule(Rule[ExpertsSection]):
    name = "experts"
    source = "DeepSeek-V3 (arXiv:2412.19437), section 2.1.2: MaxVio, which a healthy start of 8 experts brings below 2 by step 38"
    remedies = (
        "raise model.router_aux_loss_coef, or model.router_bias_rate where the router balances by its bias",
        "lower optimizer.learning_rate",
    )

    def __init__(self, settings: ExpertsSection, experts: int) -> None:
        """`experts` is the number of routed experts of a layer."""
        super().__init__(settings)
        self._experts, self._seen = experts, 0

    def symptom(self, metrics: Metrics) -> str | None:
        layers = [name.removeprefix(_VIOLATION) for name in metrics if name.startswith(_VIOLATION)]
        self._seen += bool(layers)
        if self._seen <= self.settings.warmup_steps:
            return None
        balanced = self._seen > self.settings.balance_steps
        collapsing = []
        for layer in layers:
            violation, dead = metrics[_VIOLATION + layer], metrics[f"dead_experts/{layer}"] / self._experts
            if (balanced and violation >= self.settings.violation) or dead >= self.settings.dead:
                collapsing.append(
                    f"layer {layer} (its busiest expert has {violation + 1:.1f} times its share, {dead:.0%} have nothing to do)"
                )
        return f"experts collapse in {', '.join(collapsing)}" if collapsing else None
