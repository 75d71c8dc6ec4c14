"""A step that takes far longer than the others, the time in which the process was suspended left out."""

from __future__ import annotations

import time
from statistics import median

from nmoe.config.tables.monitor import StalledSection
from nmoe.monitor.rule import Metrics, Rule
from nmoe.monitor.suspension import watched


class StalledRule(Rule[StalledSection]):
    name = "stalled"
    source = "training guidelines, monitoring: a stalled rollout"
    remedies = (
        "look at time_rollout_s, time_grade_s and time_learn_s of the step: the longest says where",
        "lower [budget] wall_s and tool_s, or a reward's timeout_s",
        "see what else runs on the machine",
    )

    def __init__(self, settings: StalledSection) -> None:
        super().__init__(settings)
        self._seconds: list[float] = []
        self._suspension = watched()

    def symptom(self, metrics: Metrics) -> str | None:
        seconds = metrics.get("time_step_s")
        if seconds is None:
            return None
        seconds -= min(seconds, self._suspension.take(time.monotonic(), time.process_time()))
        usual = median(self._seconds) if len(self._seconds) >= 5 else None
        self._seconds = [*self._seconds[-49:], seconds]
        if usual is None or seconds < max(self.settings.seconds, self.settings.factor * usual):
            return None
        return f"the step took {seconds:.0f} s, and {usual:.1f} s is usual"
