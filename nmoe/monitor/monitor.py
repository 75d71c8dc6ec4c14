"""The monitor of a run: rules with a symptom and remedies, and the alerts that a step's metrics raise, once until the symptom
ends."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

from nmoe.config.tables.monitor import Level, RuleSection

S = TypeVar("S", bound=RuleSection)

Metrics = Mapping[str, float]


class Rule(ABC, Generic[S]):
    """One rule, with its state. It sees every step once, in order, and depends on nothing else, unless it `looks_around`, so that
    a resumed run, which shows it the recorded steps first, goes on as an uninterrupted one."""

    name: ClassVar[str]
    """The rule's table under [monitor]."""
    source: ClassVar[str]
    """Where the rule comes from: the section of the training guidelines, or the paper."""
    remedies: tuple[str, ...]
    """What to try, the first thing first."""

    counts_itself: ClassVar[bool] = False
    """Whether `steps` counts stretches, evaluations or measured steps, so that one symptom is enough."""

    smoke: ClassVar[bool] = False
    """Whether it is one of the training guidelines' early smoke-test criteria, which `[monitor] first_steps` is about."""

    looks_around: ClassVar[bool] = False
    """Whether it looks at the present state of the machine, which cannot be compared with a recorded step."""

    def __init__(self, settings: S) -> None:
        self.settings = settings

    @abstractmethod
    def symptom(self, metrics: Metrics) -> str | None:
        """The symptom in this step, as the beginning of a sentence; None if there is none, or the metric is missing."""


class Recent:
    """The mean of the first steps, to compare later ones with: `Recent(5)`."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._values: list[float] = []

    def mean(self, value: float) -> float | None:
        """The mean of the first values, None as long as they are not complete; `value` is counted among them if it is finite."""
        if len(self._values) < self._count:
            if math.isfinite(value):
                self._values.append(value)
            return None
        return sum(self._values) / self._count


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
        """Shows the rules a step from before the resumption, whose alerts were raised then."""
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
        return Alert(rule.name, "warn", f"the alert of {rule.name} is over: {CALM_STEPS} steps without its symptom")
    # A rule over stretches or evaluations counts them itself, so that its first symptom fires.
    needed = 1 if rule.counts_itself else settings.steps
    if said is None or watched.raised or watched.bad < needed:
        return None
    watched.raised = True
    lasting = f", {needed} steps in a row" if needed > 1 else ""
    early = f", within the first {FIRST_STEPS} steps" if stops else ""
    return Alert(rule.name, "stop" if stops else settings.level, said + lasting + early, rule.remedies)
