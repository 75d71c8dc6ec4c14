"""Applies rules to the metrics of each step. When a rule's symptom lasts, it raises one alert, and another only after the symptom
was over."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

from nmoe.config.tables.monitor import Level, RuleSection
from nmoe.errors import DivergenceError

S = TypeVar("S", bound=RuleSection)

Metrics = Mapping[str, float]


class Rule(ABC, Generic[S]):
    """Base class of the rules that watch a run; an object keeps the rule's state.

    It gets the metrics of every step once, in order, and depends on nothing else (unless `looks_around`). So a resumed
    run, which first replays the recorded steps to it, continues like an uninterrupted one.
    """

    name: ClassVar[str]
    """The name of the rule's table under [monitor] in the configuration."""
    source: ClassVar[str]
    """The origin of the rule: a section of the training guidelines, or a paper."""
    remedies: tuple[str, ...]
    """Remedies to try when the rule fires, the most useful first."""

    counts_itself: ClassVar[bool] = False
    """Whether the rule itself counts how often its symptom has to occur; it then fires at the first symptom that it reports."""

    smoke: ClassVar[bool] = False
    """Whether the rule is one of the training guidelines' early smoke-test criteria, to which `[monitor] first_steps` applies."""

    looks_around: ClassVar[bool] = False
    """Whether the rule reads the current state of the machine, which recorded steps do not contain."""

    def __init__(self, settings: S) -> None:
        self.settings = settings

    @abstractmethod
    def symptom(self, metrics: Metrics) -> str | None:
        """Returns the symptom in this step's metrics, as the beginning of a sentence; None if there is none, or the metric is
        missing. All metrics are finite: `Monitor.observe` refuses others, with which any comparison would be false."""


class Baseline:
    """Keeps the mean of a metric's first values, which later ones are compared with: `Baseline(5)` of the first five."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._values: list[float] = []

    def mean(self, value: float) -> float | None:
        """Returns the mean of the first values once they are complete. Before that, adds `value`, and returns None."""
        if len(self._values) < self._count:
            self._values.append(value)
            return None
        return sum(self._values) / self._count


# Steps in a row without the symptom before a rule is armed again.
CALM_STEPS = 5
# How long a run is a smoke test: no smoke rule needs more steps in a row by default.
FIRST_STEPS = 10


@dataclass(frozen=True)
class Alert:
    """A message of a rule, when its symptom lasts or is over: `Alert("truncation", "warn", "83% of the completions are
    cut", (...))`."""

    rule: str
    level: Level
    message: str
    remedies: tuple[str, ...] = ()

    def record(self, step: int) -> dict[str, Any]:
        """Returns the alert as a line of alerts.jsonl."""
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
    """Watches a run with all rules except those that are off.

    A rule fires once after as many successive steps with its symptom as its setting `steps`, and again only after
    `CALM_STEPS` steps without the symptom.
    """

    def __init__(self, rules: Sequence[Rule[Any]], first_steps: Literal["warn", "stop"] = "warn") -> None:
        """Makes a monitor with these rules. With `first_steps = "stop"`, a smoke-test rule that fires in the first
        `FIRST_STEPS` steps ends the run."""
        self._first_steps, self._steps = first_steps, 0
        self._watched = [_Watched(rule) for rule in rules if rule.settings.level != "off"]

    def observe(self, metrics: Mapping[str, Any], probe: Mapping[str, float] | None = None) -> list[Alert]:
        """Returns the alerts of a step. `probe` holds the metrics of the evaluation after the step, if there was one
        (`Ledger.probed`). Raises DivergenceError naming the metrics that are NaN or infinite, at any level of the rules."""
        broken = [
            f"{name} is {value}"
            for name, value in {**metrics, **(probe or {})}.items()
            if isinstance(value, float) and not math.isfinite(value)
        ]
        if broken:
            raise DivergenceError(
                f"step {self._steps + 1}: {', '.join(broken)}; the step is not recorded. Training diverged: resume from the last "
                "checkpoint with a lower optimizer.learning_rate"
            )
        return self._alerts(self._watched, metrics, probe)

    def recall(self, metrics: Mapping[str, Any], probe: Mapping[str, float] | None = None) -> None:
        """Shows the rules a recorded step from before a resumption, without raising its alerts again. Rules that read the state of
        the machine (`looks_around`) are left out."""
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
