"""A rule that fires when engine and learner compute different log-probabilities for the same tokens, by more than rounding."""

from __future__ import annotations

from nmoe.config.tables.monitor import MismatchSection
from nmoe.monitor.monitor import Metrics, Rule

# The mean difference of a token's log-probabilities at one nat of entropy. A model of 30 layers has 5e-6 in float32 and 0.02 in
# bfloat16, and 0.06 where its weights are changed by 1% (docs/playbook.md).
_ABOVE = {"float32": 1e-4}
_ABOVE_IN_HALF_PRECISION = 0.05
# Steps that the level of a run is the mean of.
_LEVEL_STEPS = 5


def highest_mismatch(precision: str, entropy: float) -> float:
    """Returns the largest mean difference of a token's log-probabilities, in nats, that rounding in this precision explains.

    `entropy` is the policy's mean entropy in nats per token. Rounding changes the likely tokens of a sharp distribution
    less: the difference is proportional to the square root of the entropy (docs/decisions.md). Below one nat the bound
    stays constant, because a few uncertain tokens then dominate.
    """
    return _ABOVE.get(precision, _ABOVE_IN_HALF_PRECISION) * max(entropy, 1.0) ** 0.5


class MismatchRule(Rule[MismatchSection]):
    """Fires when the metric mismatch_abs_mean exceeds a bound, or grows.

    The metric is the mean difference between engine and learner in the log-probability of a token. Growth is measured
    against a baseline: the lowest mean over five steps of the metric divided by the square root of the entropy. Since
    this baseline can only fall, later growth stays visible after the policy becomes sharp, unlike with a baseline from
    the first steps.
    """

    name = "mismatch"
    source = "Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
    counts_itself = True

    def __init__(
        self,
        settings: MismatchSection,
        precision: str = "float32",
        *,
        exact: bool = False,
        routes: bool = False,
        truncates: bool = False,
        corrects: bool = False,
    ) -> None:
        """Makes the rule for a run. `exact` says that numerics are exact on this machine, so that any difference is a symptom.

        The other arguments select remedies: `routes` if the model has routed experts, `truncates` if top-p or top-k is
        on, and `corrects` if algorithm.correction is on.
        """
        super().__init__(settings)
        self._precision, self._exact = precision, exact
        self._recent: list[float] = []
        self._level: float | None = None
        self._bad = 0
        first = (
            "report it"
            if exact
            else 'set [model] numerics = "exact": rounding then makes no difference, a fault still does'
        )
        hints = {
            'correct for it: algorithm.correction = "tis"': not corrects,
            "look at route_flips": routes,
            "look at what top-p and top-k keep": truncates,
        }
        self.remedies = (first, *(hint for hint, applies in hints.items() if applies))

    def symptom(self, metrics: Metrics) -> str | None:
        mean = metrics.get("mismatch_abs_mean")
        if mean is None:  # a step without an update measures nothing, and does not break a row of steps
            return None
        entropy = metrics.get("entropy_mean", 1.0)
        said = self._excess(mean, entropy)
        self._bad = 0 if said is None else self._bad + 1
        if said is None or self._bad < self.settings.steps:
            return None
        return f"engine and learner differ by {mean:.2g} a token, {self.settings.steps} steps in a row, {said}"

    def _excess(self, mean: float, entropy: float) -> str | None:
        """Returns a description of the bound that the mismatch exceeds; None if it exceeds none."""
        if self._exact and not self.settings.above:
            return "and with exact numerics by nothing" if mean > 0 else None
        bound = highest_mismatch(self._precision, entropy)
        if self.settings.above:
            bound *= self.settings.above / highest_mismatch(self._precision, 0.0)
        level, scaled = self._level, mean / max(entropy, 1e-3) ** 0.5
        self._recent = [*self._recent[1 - _LEVEL_STEPS :], scaled]
        if len(self._recent) == _LEVEL_STEPS:
            recent = sum(self._recent) / _LEVEL_STEPS
            self._level = recent if level is None else min(level, recent)
        if mean > bound:
            return f"and {bound:.2g} is the most that rounding explains"
        # Far below the bound a difference is rounding, which comes and goes.
        if level is None or mean <= bound / 10 or scaled <= self.settings.growth * level:
            return None
        times = f"{scaled / level:.1f} times as much as before" if level else "where there was none before"
        return f"{times} at the same entropy"
