"""A rule: the symptom it looks for, where the playbook describes it, and what to try."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Generic, TypeVar

from nmoe.config.tables.monitor import RuleSection

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
    """Whether it looks at the machine as it is now, which says nothing of a recorded step."""

    def __init__(self, settings: S) -> None:
        self.settings = settings

    @abstractmethod
    def symptom(self, metrics: Metrics) -> str | None:
        """What is wrong in this step, as the beginning of a sentence; None where nothing is, or the metric is not there."""


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
