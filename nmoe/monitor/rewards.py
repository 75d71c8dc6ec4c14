"""Rules about rewards: equal rewards, a reward that does not rise, few solved problems, rewards for wrong answers,
worse evaluations."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt
from statistics import fmean, mean

from nmoe.config.tables.monitor import FlatSection, HackingSection, ProbeSection, RewardStuckSection, SolveRateSection
from nmoe.monitor.monitor import Metrics, Rule


class RewardStuckRule(Rule[RewardStuckSection]):
    """Fires when in every group of a step all rewards are equal, or for another reason no group is left to train on, so that
    nothing can be learned."""

    name = "reward_stuck"
    smoke = True
    source = (
        "training guidelines, early smoke-test criteria: reward_mean not stuck at 0 or 1, advantage_std not stuck at 0"
    )
    remedies = (
        "at the lowest reward: read samples/, and grade a right answer with `nmoe env check`",
        "then take easier problems, or a larger batch.group_size",
        "at the highest: the problems are solved; take harder ones",
    )

    def symptom(self, metrics: Metrics) -> str | None:
        spread, mean = metrics.get("advantage_std", metrics.get("reward_std")), metrics.get("reward_mean")
        if mean is None or (not metrics.get("skipped") and spread != 0):
            return None
        return f"all rewards of a group are alike (mean {mean:.3g}), so that nothing can be learned"


# Steps whose mean reward is compared. A rise is more than three standard errors above the best mean before. The error of a step
# comes from the differences of steps in a row, which a trend hardly widens (von Neumann et al. 1941).
_WINDOW = 10
_ERRORS = 3.0
_DIFFERENCES = 50


class FlatRule(Rule[FlatSection]):
    """Fires when the mean reward of ten steps has not risen beyond its noise for `steps` steps, unless most problems are solved.
    Begins anew with each stage of a curriculum, because rewards of different stages cannot be compared."""

    name = "flat"
    source = "training guidelines, tuning playbook: flat learning; early smoke-test criteria, flat after 5 episodes"
    counts_itself = True
    remedies = (
        "check grad_norm (0: nothing moves), truncated and has_boxed: other rules watch these",
        "raise batch.group_size, then optimizer.learning_rate, one at a time; lower algorithm.kl_coef",
        "improve the signal: easier problems or a curriculum, a reward that separates right answers from wrong ones",
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
        if "reward_mean" not in metrics:
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
        """Returns the standard deviation of one step's mean reward, estimated from differences of consecutive steps."""
        return sqrt(fmean((after - before) ** 2 for before, after in pairwise(self._rewards)) / 2)


class SolveRateRule(Rule[SolveRateSection]):
    """Fires when hardly any problem is solved, or a rate outside the band that is set."""

    name = "solve_rate"
    source = "training guidelines, tier 1: correctness of 20% to 60%; tuning playbook, solve rate below 5%"
    remedies = (
        "take easier problems first: `easy_first` of the task pool, batch.favour_learnable, or a [curriculum]",
        "raise batch.group_size, so that more groups have a right answer",
        "score the quality of right answers only: a [[rewards]] with only_if_correct = true",
        "above the band: take harder problems, or batch.solve_rate",
    )

    def symptom(self, metrics: Metrics) -> str | None:
        rate, band = metrics.get("correctness"), self.settings.band
        if rate is None:
            return None
        if rate < self.settings.below:
            return f"only {rate:.1%} of the answers are right"
        if band is not None and not band[0] <= rate <= band[1]:
            kind = "hard" if rate < band[0] else "easy"
            return f"{rate:.1%} of the answers are right, outside {band[0]:.0%} to {band[1]:.0%}: too {kind} problems"
        return None


class RewardHackingRule(Rule[HackingSection]):
    """Fires when many samples are wrong and earn more than half of the reward for being right. Does not fire while correctness is
    not the largest weight of a curriculum's stage."""

    name = "reward_hacking"
    source = "training guidelines, tier 3: high_reward_but_wrong; tuning playbook, reward hacking"
    remedies = (
        "read the samples that are wrong and highly rewarded",
        "weigh correctness more than everything else in [rubric] and [[rewards]]",
        "add a second judge",
    )

    def symptom(self, metrics: Metrics) -> str | None:
        share = metrics.get("high_reward_but_wrong")
        # While correctness is not the largest part of the score, a high reward for a wrong answer is what the stage asks for.
        weights = {name: value for name, value in metrics.items() if name.startswith("weight/")}
        early = bool(weights) and weights.get("weight/correctness", 0.0) < max(weights.values())
        if share is None or early or share <= self.settings.above:
            return None
        return f"{share:.0%} of the samples are wrong and earn more than half of what being right pays"


class WrongRewardRule(RewardHackingRule):
    """Replaces `RewardHackingRule` where only right answers are rewarded: fires at once when a wrong answer is rewarded above
    the mean."""

    source = "training guidelines, overfitting: high_reward_but_wrong is only relevant with a judge, not with pure exact match"
    counts_itself = True
    remedies = (
        "end the run: its rewards contradict its environment",
        "find such a sample in samples/, and grade its answer with `nmoe env check` or `nmoe replay`",
        "report it, if both the task and the grader come from nmoe",
    )

    def symptom(self, metrics: Metrics) -> str | None:
        share = metrics.get("rewarded_but_wrong", 0.0)
        if share == 0:
            return None
        return f"{share:.1%} of the samples are wrong and rewarded above the mean, though right answers alone are: this is a bug"


class ProbeRule(Rule[ProbeSection]):
    """Fires when the model solves significantly fewer held-out problems than before, or has a higher held-out loss, in several
    evaluations in a row."""

    name = "probe"
    source = "training guidelines, overfitting: the OOD probe is worse for two evaluations in a row"
    counts_itself = True
    remedies = (
        "take the best checkpoint, which is an earlier one, and end the run",
        "read samples/ for what earns reward without being right",
        "raise algorithm.kl_coef; lower optimizer.learning_rate; use more problems",
    )

    def __init__(self, settings: ProbeSection) -> None:
        super().__init__(settings)
        self._rewards: list[float] = []
        self._lost = 0

    def symptom(self, metrics: Metrics) -> str | None:
        if "reward_mean" in metrics:
            self._rewards.append(metrics["reward_mean"])
        if "probe" not in metrics:
            return None
        lost = metrics.get("probe_before", metrics["probe"]) - metrics["probe"]
        self._lost = self._lost + 1 if "probe_before" in metrics and lost >= self.settings.drop else 0
        if self._lost < self.settings.steps:
            return None
        half = len(self._rewards) // 2
        rises = half > 0 and mean(self._rewards[half:]) > mean(self._rewards[:half])
        now, before = metrics["probe"], metrics["probe_before"]
        # The negative of a loss: a share of problems is not below 0.
        worse = (
            f"the held-out loss is {-now:.4f} after {-before:.4f}"
            if now < 0
            else f"held-out problems are solved at {now:.1%} after {before:.1%}"
        )
        return (
            f"{worse}, which is more than chance"
            + (f", {self._lost} evaluations in a row" if self._lost > 1 else "")
            + (", while the reward rises" if rises else "")
        )
