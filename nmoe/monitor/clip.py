"""Updates that are clipped away, or that leave the range of the clip in one."""

from __future__ import annotations

from nmoe.config.tables.monitor import ClipSection
from nmoe.monitor.rule import Metrics, Rule


class ClipRule(Rule[ClipSection]):
    name = "clip"
    smoke = True
    source = "training guidelines, early smoke-test criteria: ppo_clip_ratio below 40%"
    remedies = (
        "lower optimizer.learning_rate",
        "lower batch.updates_per_step or batch.passes_per_step",
    )

    def symptom(self, metrics: Metrics) -> str | None:
        inside, after = metrics.get("ppo_clip_ratio", 0.0), metrics.get("update_clip_ratio", 0.0)
        if inside > self.settings.above:
            return f"{inside:.0%} of the tokens are clipped"
        return (
            f"the update takes {after:.0%} of the tokens out of the clip range" if after > self.settings.above else None
        )
