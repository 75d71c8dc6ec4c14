"""Completions that shrink to a fraction of their length, or grow to a multiple."""

from __future__ import annotations

from nmoe.config.tables.monitor import LengthSection
from nmoe.monitor.rule import Metrics, Recent, Rule


class LengthRule(Rule[LengthSection]):
    name = "length"
    source = "training guidelines, tier 3: response length; tuning playbook, length collapse"
    remedies = (
        "read samples/: a reward may pay for length alone",
        "set algorithm.length_penalty against growth; weigh correctness more against collapse",
        "raise algorithm.kl_coef",
    )

    def __init__(self, settings: LengthSection) -> None:
        super().__init__(settings)
        self._start = Recent(5)

    def symptom(self, metrics: Metrics) -> str | None:
        length = metrics.get("response_length_mean")
        if length is None or (start := self._start.mean(length)) is None:
            return None
        if start / self.settings.factor <= length <= start * self.settings.factor:
            return None
        return f"completions have {length:.1f} tokens and had {start:.1f}"
