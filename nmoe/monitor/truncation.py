"""Completions that are cut at the token limit."""

from __future__ import annotations

from nmoe.config.tables.monitor import TruncationSection
from nmoe.monitor.rule import Metrics, Rule


class TruncationRule(Rule[TruncationSection]):
    name = "truncation"
    smoke = True
    source = "training guidelines, early smoke-test criteria: truncated below 50%; tuning playbook, high truncation"
    remedies = (
        "raise sampling.max_new_tokens",
        "set algorithm.length_penalty, or algorithm.overlong_buffer",
        "teach shorter answers by a small SFT phase",
    )

    def symptom(self, metrics: Metrics) -> str | None:
        cut = metrics.get("truncated")
        return (
            f"{cut:.0%} of the completions are cut at the token limit"
            if cut is not None and cut > self.settings.above
            else None
        )
