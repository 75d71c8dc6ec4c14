"""A format that is rare, or being lost."""

from __future__ import annotations

from nmoe.config.tables.monitor import FormatSection
from nmoe.monitor.rule import Metrics, Rule


class FormatRule(Rule[FormatSection]):
    name = "format"
    smoke = True
    source = "training guidelines, early smoke-test criteria: has_boxed above 50% and not dropping; tier 1: it stays above 90%"
    remedies = (
        "look at the failures in samples/ and `failures/parse_error`",
        "teach the format by a small SFT phase",
        "weigh the format more in [rubric]",
    )

    def __init__(self, settings: FormatSection, boxes: bool = False) -> None:
        """With `boxes` the answer belongs in a box, and nothing but a right answer is rewarded for it."""
        super().__init__(settings)
        self._boxes = boxes
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
        if rate < self.settings.below:
            return f"only {rate:.0%} of the completions have the required format"
        boxed = metrics.get("has_boxed", 1.0)
        if self._boxes and boxed < self.settings.boxed:
            return f"only {boxed:.0%} of the completions have a box, which the answer belongs in"
        return None
