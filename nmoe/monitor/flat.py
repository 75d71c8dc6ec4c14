"""A reward that does not rise."""

from __future__ import annotations

from itertools import pairwise
from math import isfinite, nan, sqrt
from statistics import fmean

from nmoe.config.tables.monitor import FlatSection
from nmoe.monitor.rule import Metrics, Rule

# Steps whose mean reward is compared. A rise is more than three standard errors above the best mean before. The error of a step
# comes from the differences of steps in a row, which a trend hardly widens (von Neumann et al. 1941).
_WINDOW = 10
_ERRORS = 3.0
_DIFFERENCES = 50


class FlatRule(Rule[FlatSection]):
    name = "flat"
    source = "training guidelines, tuning playbook: flat learning; early smoke-test criteria, flat after 5 episodes"
    counts_itself = True
    remedies = (
        "check grad_norm (0: nothing moves), truncated and has_boxed: these have rules of their own",
        "raise batch.group_size, then optimizer.learning_rate, one at a time; lower algorithm.kl_coef",
        "improve the signal: easier problems or a curriculum, a reward that tells right answers apart",
    )

    def __init__(self, settings: FlatSection) -> None:
        super().__init__(settings)
        self._stage = 0.0
        self._begin()

    def _begin(self) -> None:
        self._rewards: list[float] = []
        self._best: float | None = None
        self._since = 0

    def symptom(self, metrics: Metrics) -> str | None:
        if not isfinite(metrics.get("reward_mean", nan)):  # one of these in the best mean would be there for ever
            return None
        # Another stage of the curriculum has other weights, and with them another reward.
        if (stage := metrics.get("curriculum_stage", 0.0)) != self._stage:
            self._stage = stage
            self._begin()
        self._rewards = [*self._rewards[-_DIFFERENCES:], metrics["reward_mean"]]
        self._since += 1
        if len(self._rewards) < _WINDOW:
            return None
        mean = fmean(self._rewards[-_WINDOW:])
        if self._best is None or mean > self._best + _ERRORS * self._error() / sqrt(_WINDOW):
            # Nothing before the first mean can have risen; the steps of a later one are those since the last rise.
            self._since = self._since if self._best is None else 0
            self._best = mean
        if self._since < self.settings.steps or metrics.get("correctness", 0.0) >= self.settings.solved:
            return None
        return f"the reward has not risen for {self._since} steps: {mean:.3g} in the last {_WINDOW}, {self._best:.3g} at best"

    def _error(self) -> float:
        """The standard deviation of one step's mean reward."""
        return sqrt(fmean((after - before) ** 2 for before, after in pairwise(self._rewards)) / 2)
