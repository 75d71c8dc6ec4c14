"""Problems of which hardly any is solved."""

from __future__ import annotations

from nmoe.config.tables.monitor import SolveRateSection
from nmoe.monitor.rule import Metrics, Rule


class SolveRateRule(Rule[SolveRateSection]):
    name = "solve_rate"
    source = "training guidelines, tier 1: correctness of 20% to 60%; tuning playbook, solve rate below 5%"
    remedies = (
        "take easier problems first: `easy_first` of the task pool, batch.favour_learnable, or a [curriculum]",
        "raise batch.group_size, so that more groups have a right answer",
        "score the quality of right answers only: a [[rewards]] with only_if_correct = true",
    )

    def symptom(self, metrics: Metrics) -> str | None:
        rate = metrics.get("correctness")
        return f"only {rate:.1%} of the answers are right" if rate is not None and rate < self.settings.below else None
