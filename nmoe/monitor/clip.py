"""Updates that are clipped away."""

from __future__ import annotations

from nmoe.config.tables.monitor import ClipSection
from nmoe.monitor.rule import Metrics, Rule


class ClipRule(Rule[ClipSection]):
    name = "clip"
    source = "training guidelines, early smoke-test criteria: ppo_clip_ratio below 40%"
    remedies = (
        "lower optimizer.learning_rate",
        "lower batch.updates_per_step or batch.passes_per_step",
    )

    def symptom(self, metrics: Metrics) -> str | None:
        share = metrics.get("ppo_clip_ratio")
        return f"{share:.0%} of the tokens are clipped" if share is not None and share > self.settings.above else None
