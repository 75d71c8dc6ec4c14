"""The rules of a run together: what each step's metrics set off, once, and when it is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nmoe.config.tables.monitor import Level
from nmoe.monitor.rule import Rule

# Steps in a row without the symptom before a rule is armed again.
CALM_STEPS = 5
# How long a run is a smoke test: no smoke rule needs more steps in a row by default.
FIRST_STEPS = 10


@dataclass(frozen=True)
class Alert:
    """A rule that fired: `Alert("truncation", "warn", "83% of the completions are cut at the token limit, 5 steps in a
    row", (...))`, or that is over."""

    rule: str
    level: Level
    message: str
    remedies: tuple[str, ...] = ()

    def record(self, step: int) -> dict[str, Any]:
        """The line of alerts.jsonl."""
        return {
            "step": step,
            "rule": self.rule,
            "level": self.level,
            "message": self.message,
            "remedies": list(self.remedies),
        }

    def __str__(self) -> str:
        remedies = f"; try: {'; '.join(self.remedies)}" if self.remedies else ""
        return f"{self.message} [monitor.{self.rule}]{remedies}"


@dataclass
class _Watched:
    rule: Rule[Any]
    bad: int = 0
    calm: int = 0
    raised: bool = False


class Monitor:
    """All rules of a run that are not off. A rule fires after `steps` steps in a row with its symptom, once, and again
    only after `CALM_STEPS` steps without it."""

    def __init__(self, rules: Sequence[Rule[Any]], first_steps: Literal["warn", "stop"] = "warn") -> None:
        """With `first_steps = "stop"` a smoke rule that fires in the first `FIRST_STEPS` steps ends the run."""
        self._first_steps, self._steps = first_steps, 0
        self._watched = [_Watched(rule) for rule in rules if rule.settings.level != "off"]

    def observe(self, metrics: Mapping[str, Any], probe: Mapping[str, float] | None = None) -> list[Alert]:
        """The alerts of a step. `probe` is what the evaluation after it found, if there was one (`Ledger.probed`)."""
        return self._alerts(self._watched, metrics, probe)

    def recall(self, metrics: Mapping[str, Any], probe: Mapping[str, float] | None = None) -> None:
        """Shows the rules a step of before the run was resumed, whose alerts are told already."""
        self._alerts([one for one in self._watched if not one.rule.looks_around], metrics, probe)

    def _alerts(
        self, watched: Sequence[_Watched], metrics: Mapping[str, Any], probe: Mapping[str, float] | None
    ) -> list[Alert]:
        self._steps += 1
        stops = self._first_steps == "stop" and self._steps <= FIRST_STEPS
        seen = {**metrics, **(probe or {})}
        return [alert for one in watched if (alert := _observe(one, seen, stops and one.rule.smoke)) is not None]


def _observe(watched: _Watched, metrics: Mapping[str, Any], stops: bool) -> Alert | None:
    rule, settings = watched.rule, watched.rule.settings
    said = rule.symptom(metrics)
    watched.bad = 0 if said is None else watched.bad + 1
    watched.calm = watched.calm + 1 if said is None else 0
    if watched.raised and watched.calm >= CALM_STEPS:
        watched.raised = False
        return Alert(rule.name, "warn", f"over: {CALM_STEPS} steps without it")
    # A rule over stretches or evaluations counts them itself: what it says holds at once.
    needed = 1 if rule.counts_itself else settings.steps
    if said is None or watched.raised or watched.bad < needed:
        return None
    watched.raised = True
    lasting = f", {needed} steps in a row" if needed > 1 else ""
    early = f", within the first {FIRST_STEPS} steps" if stops else ""
    return Alert(rule.name, "stop" if stops else settings.level, said + lasting + early, rule.remedies)
