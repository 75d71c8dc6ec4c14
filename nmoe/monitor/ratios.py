"""Tokens whose probability an update changes many times over."""

from __future__ import annotations

from nmoe.config.tables.monitor import RatiosSection
from nmoe.monitor.rule import Metrics, Rule


class RatiosRule(Rule[RatiosSection]):
    name = "ratios"
    source = "training guidelines, tier 2 tails: log_ratio_raw_max above 5, ratio_max above 10"
    remedies = (
        "lower algorithm.clip_low and clip_high",
        "lower optimizer.learning_rate; clipping advantages does not help",
        "read the worst samples of spikes.jsonl",
    )

    def symptom(self, metrics: Metrics) -> str | None:
        raw, ratio = metrics.get("log_ratio_raw_max", 0.0), metrics.get("ratio_max", 0.0)
        if raw > self.settings.log_ratio:
            return f"a token's log ratio is {raw:.3g}"
        if ratio > self.settings.above:
            return f"a token's importance ratio is {ratio:.3g}"
        # What the updates did, upwards and downwards: a token that was pushed away is as far.
        high, low = metrics.get("update_log_ratio_max", 0.0), metrics.get("update_log_ratio_min", 0.0)
        far = max(high, low, key=abs)
        if abs(far) > self.settings.log_ratio:
            return f"the update moves a token's log-probability by {far:+.3g}"
        ratio = metrics.get("update_ratio_max", 0.0)
        return f"the update makes a token {ratio:.3g} times as likely" if ratio > self.settings.above else None
