"""A rule that fires when engine and learner compute different log-probabilities for the same tokens, by more than rounding."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

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


_EACH = "mismatch_abs_mean/"


@dataclass
class _History:
    """The last steps of one metric, scaled by the entropy; the lowest mean of five; and the steps in a row with the symptom."""

    recent: list[float] = field(default_factory=list)
    level: float | None = None
    bad: int = 0


class MismatchRule(Rule[MismatchSection]):
    """Fires when the metric mismatch_abs_mean exceeds a bound, or grows; of several engine servers, when the metric of one does.

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
        servers: bool = False,
    ) -> None:
        """Makes the rule for a run. `exact` says that numerics are exact on this machine, so that any difference is a symptom.

        The other arguments select remedies: `routes` if the model has routed experts, `truncates` if top-p or top-k is
        on, `corrects` if algorithm.correction is on, and `servers` if engine servers sample.
        """
        super().__init__(settings)
        self._precision, self._exact = precision, exact
        self._histories: defaultdict[str, _History] = defaultdict(_History)
        first = (
            "report it"
            if exact
            else 'set [model] numerics = "exact": rounding then makes no difference, a fault still does'
        )
        hints = {
            "start that server again, or leave it out of engine.urls; its log is in engines/": servers,
            'correct for it: algorithm.correction = "tis"': not corrects,
            "look at route_flips": routes,
            "look at what top-p and top-k keep": truncates,
        }
        self.remedies = (first, *(hint for hint, applies in hints.items() if applies))

    def symptom(self, metrics: Metrics) -> str | None:
        # The mean over all would hide one engine of eight. A step without an update measures nothing, and does not break a row.
        engines = {name.removeprefix(_EACH): mean for name, mean in metrics.items() if name.startswith(_EACH)}
        if not engines and "mismatch_abs_mean" in metrics:
            engines = {"engine": metrics["mismatch_abs_mean"]}
        entropy, found = metrics.get("entropy_mean", 1.0), []
        for name, mean in engines.items():
            history = self._histories[name]
            said = self._excess(history, mean, entropy)
            history.bad = 0 if said is None else history.bad + 1
            if said is not None and history.bad >= self.settings.steps:
                of = f" of {len(engines)}" if len(engines) > 1 else ""
                found.append(
                    f"{name}{of} and learner differ by {mean:.2g} a token, {self.settings.steps} steps in a row, {said}"
                )
        return "; ".join(found) or None

    def _excess(self, history: _History, mean: float, entropy: float) -> str | None:
        """Returns a description of the bound that the mismatch exceeds; None if it exceeds none."""
        if self._exact and not self.settings.above:
            return "and with exact numerics by nothing" if mean > 0 else None
        bound = highest_mismatch(self._precision, entropy)
        if self.settings.above:
            bound *= self.settings.above / highest_mismatch(self._precision, 0.0)
        level, scaled = history.level, mean / max(entropy, 1e-3) ** 0.5
        history.recent = [*history.recent[1 - _LEVEL_STEPS :], scaled]
        if len(history.recent) == _LEVEL_STEPS:
            recent = sum(history.recent) / _LEVEL_STEPS
            history.level = recent if level is None else min(level, recent)
        if mean > bound:
            return f"and {bound:.2g} is the most that rounding explains"
        # Far below the bound a difference is rounding, which comes and goes.
        if level is None or mean <= bound / 10 or scaled <= self.settings.growth * level:
            return None
        times = f"{scaled / level:.1f} times as much as before" if level else "where there was none before"
        return f"{times} at the same entropy"
