"""A format that is rare, or being lost."""

from __future__ import annotations

from nmoe.config.tables.monitor import FormatSection
from nmoe.monitor.rule import Metrics, Rule


class FormatRule(Rule[FormatSection]):
    name = "format"
    source = "training guidelines, early smoke-test criteria: has_boxed above 50% and not dropping"
    remedies = (
        "look at the failures in samples/ and `failures/parse_error`",
        "teach the format by a small SFT phase",
        "weigh the format more in [rubric]",
    )

    def __init__(self, settings: FormatSection) -> None:
        super().__init__(settings)
        self._last: list[float] = []
        self._best = 0.0

    def symptom(self, metrics: Metrics) -> str | None:
        rate = metrics.get("format_ok")
        if rate is None:
            return None
        self._last = [*self._last[-4:], rate]
        if len(self._last) == 5:
            best, self._best = self._best, max(self._best, sum(self._last) / 5)
            if rate < best - self.settings.drop:
                return f"{rate:.0%} of the completions have the required format, and {best:.0%} had it"
        return f"only {rate:.0%} of the completions have the required format" if rate < self.settings.below else None
