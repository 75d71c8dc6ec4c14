"""What updates the policy: one or several optimizer steps on the groups of a step."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from nmoe.config.commands.rl import RLConfig
from nmoe.config.tables.algorithm import AlgorithmSection
from nmoe.envs.pools.order import stable_hash
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import Objective, cispo, clip, dppo, entropy_bonus, gspo, reference_divergence, total
from nmoe.rl.batch import selected
from nmoe.rl.critic import Critic
from nmoe.rl.experience import Experience, Experiences
from nmoe.rl.metrics import joined_passes, joined_steps, update_metrics
from nmoe.rl.reference import Reference
from nmoe.rl.teacher import Teacher
from nmoe.types import Group


def policy_objective(algorithm: AlgorithmSection, critic: Critic | None = None) -> Objective:
    """The loss that [algorithm] names, with its penalty, its bonus, and the value loss of a critic on the policy's trunk."""
    low, high = algorithm.clip_range
    if algorithm.loss == "cispo":
        parts = [cispo(high)]
    else:
        assert low is not None, "every loss but cispo has a lower bound"
        if algorithm.loss == "gspo":
            parts = [gspo(low, high)]
        elif algorithm.loss == "dppo":
            parts = [dppo(low, high)]
        else:
            parts = [clip(low, high, algorithm.dual_clip_bound if algorithm.loss == "dual_clip" else None)]
    if algorithm.kl_coef > 0 and algorithm.kl_in == "loss":
        parts.append(
            reference_divergence(algorithm.kl_coef, algorithm.kl_estimator or "k3", algorithm.kl_importance_weights)
        )
    if algorithm.entropy_coef > 0:
        parts.append(entropy_bonus(algorithm.entropy_coef))
    if critic is not None and (value := critic.shared_objective()) is not None:
        parts.append(value)
    return total(*parts)


class PolicyUpdate:
    """The optimizer steps of a learner, and of its critic, on the groups of one step."""

    def __init__(
        self,
        config: RLConfig,
        learner: Learner,
        reference: Reference | None,
        critic: Critic | None,
        token_limit: int,
        teacher: Teacher | None = None,
    ) -> None:
        """`token_limit` is the most tokens that a sample may have."""
        self._config, self.learner, self.critic, self.reference = config, learner, critic, reference
        self.token_limit = token_limit
        self._experiences = Experiences(config, learner, reference, critic, token_limit, teacher)
        self._objective = policy_objective(config.algorithm, critic)

    def update(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Takes the steps and returns their metrics; no step and no metrics where every sample was cut and those are masked."""
        experience = self._experiences.of(groups)
        if experience is None:
            return {}
        metrics = experience.metrics
        trains_policy = self.critic is None or not self.critic.warming_up(step)
        passes, steps = [], []
        for minibatch in self._minibatches(step, experience):
            if self.critic is not None:
                self.critic.update(minibatch)
            if trains_policy:
                passes.append(self.learner.forward_backward(minibatch, self._objective).result())
                steps.append(self.learner.optim_step().result())
                if self.critic is not None:
                    self.critic.observe_policy(minibatch, passes[-1])
        if trains_policy:
            result, last = joined_passes(passes), joined_steps(steps)
            metrics |= update_metrics(result, last, experience.advantages, experience.mismatch)
        if self.critic is not None:
            metrics |= self.critic.metrics(experience.batch)
        return metrics

    def _minibatches(self, step: int, experience: Experience) -> Iterator[Batch]:
        """What each optimizer step of this step is taken on: the whole batch or, by whole groups and in an order that is drawn anew
        for every pass, its parts."""
        config, reduction = self._config.batch, self._config.algorithm.aggregation
        if config.updates == 1:
            yield experience.batch
            return
        members: dict[int, list[int]] = {}
        for sequence, group in enumerate(experience.group_ids_S.tolist()):
            members.setdefault(group, []).append(sequence)
        parts = min(config.updates_per_step, len(members))
        for number in range(config.passes_per_step):
            order = list(members)
            random.Random(stable_hash("minibatches", self._config.run.seed, step, number)).shuffle(order)
            for part in range(parts):
                sequences = sorted(i for group in order[part::parts] for i in members[group])
                yield selected(experience.batch, sequences, reduction, self._config.sampling.max_new_tokens)
