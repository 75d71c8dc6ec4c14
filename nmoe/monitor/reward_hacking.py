"""High rewards for wrong answers."""

from __future__ import annotations

from nmoe.config.tables.monitor import HackingSection
from nmoe.monitor.rule import Metrics, Rule


class RewardHackingRule(Rule[HackingSection]):
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
    """The same table where right answers alone are rewarded: a wrong one then has the lowest reward there is."""

    source = "training guidelines, overfitting: high_reward_but_wrong is only relevant with a judge, not with pure exact match"
    counts_itself = True
    remedies = (
        "end the run: what it learns from is not what its environment says",
        "find such a sample in samples/, and grade its answer with `nmoe env check` or `nmoe replay`",
        "report it, if the task and the grader are those of nmoe",
    )

    def symptom(self, metrics: Metrics) -> str | None:
        share = metrics.get("rewarded_but_wrong", 0.0)
        if share == 0:
            return None
        return f"{share:.1%} of the samples are wrong and rewarded above the mean, though right answers alone are: this is a bug"
