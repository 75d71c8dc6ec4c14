"""What updates the policy: graded groups become a batch with advantages, the batch one or several optimizer steps."""

# Shapes: B samples, N scored tokens.

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from nmoe.config.run import AlgorithmSection, RLConfig
from nmoe.learner.aggregation import token_weights
from nmoe.learner.batch import Batch
from nmoe.learner.correction import correction_weights
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import (
    Objective,
    cispo,
    clip,
    dppo,
    entropy_bonus,
    gspo,
    reference_divergence,
    total,
)
from nmoe.recipes.distillation import Teacher
from nmoe.recipes.policy_advantages import reward_divergence, with_advantages
from nmoe.recipes.policy_batch import policy_batch
from nmoe.recipes.policy_metrics import joined_passes, joined_steps, update_metrics
from nmoe.recipes.policy_reference import Reference
from nmoe.recipes.policy_rewards import group_ids
from nmoe.recipes.ppo import Critic
from nmoe.rl.pools.order import stable_hash
from nmoe.rl.rollout.trajectory import Group


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
        parts.append(reference_divergence(algorithm.kl_coef, algorithm.kl_estimator or "k3"))
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
        self._config, self._learner, self._reference, self._critic = config, learner, reference, critic
        self._token_limit, self._teacher = token_limit, teacher
        self._objective = policy_objective(config.algorithm, critic)
        # After the first update the learner is no longer what the sampler was, and its ratio is to itself as it began.
        self._keeps_old = config.batch.updates > 1 or config.algorithm.correction != "none"

    def update(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Takes the steps and returns their metrics; no step and no metrics where every sample was cut and those are masked."""
        batch, group_ids_B, advantages, taught = self._experience(groups)
        if not batch.lengths:
            return {}
        batch, metrics = self._corrected(batch)
        metrics |= taught
        trains_policy = self._critic is None or not self._critic.warming_up(step)
        passes, steps = [], []
        for minibatch in self._minibatches(step, batch, group_ids_B):
            if self._critic is not None:
                self._critic.update(minibatch)
            if trains_policy:
                passes.append(self._learner.forward_backward(minibatch, self._objective).result())
                steps.append(self._learner.optim_step().result())
                if self._critic is not None:
                    self._critic.observe_policy(minibatch, passes[-1])
        if trains_policy:
            metrics |= update_metrics(joined_passes(passes), joined_steps(steps), advantages, _mismatch(batch))
        if self._critic is not None:
            metrics |= self._critic.metrics(batch)
        if (divergence_T := reward_divergence(batch, self._config.algorithm)) is not None:
            mean = divergence_T[batch.scored_T].double().mean()
            metrics["reference_kl"] = float(mean) / -self._config.algorithm.kl_coef
        return metrics

    def _experience(self, groups: Sequence[Group]) -> tuple[Batch, Tensor, Tensor, dict[str, float]]:
        """The judged samples as a batch with all columns, less those that were cut where they are masked; the group of each, `[B]`;
        the advantages to take figures of; and what the teacher had to say."""
        config = self._config
        trajectories = [trajectory for group in groups for trajectory in group.trainable]
        batch = policy_batch(trajectories, None, config.algorithm.aggregation, config.sampling.max_new_tokens)
        if self._reference is not None:
            batch = batch.with_reference(self._reference.logprobs(batch))
        if self._keeps_old:
            batch = replace(batch, old_logprobs_T=batch.column(self._learner.logprobs(batch).result()))
        if self._critic is not None:
            batch = self._critic.with_values(batch)
        batch, advantages = with_advantages(batch, groups, config, self._token_limit)
        taught: dict[str, float] = {}
        if self._teacher is not None:
            batch, advantages, taught = self._teacher.advise(batch)
        group_ids_B = group_ids(groups)
        if config.algorithm.mask_truncated:
            ended = [i for i, t in enumerate(trajectories) if t.finish_reasons[-1] != "length"]
            batch, group_ids_B = self._selected(batch, ended), group_ids_B[ended]
        return batch, group_ids_B, advantages, taught

    def _corrected(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The batch with the weights for a sampler that was not the learner in its advantages, and their figures."""
        algorithm = self._config.algorithm
        if algorithm.correction == "none":
            return batch, {}
        assert batch.old_logprobs_T is not None
        assert batch.behaviour_logprobs_T is not None
        assert batch.advantages_T is not None
        window = algorithm.correction_window
        weights_N, metrics = correction_weights(
            algorithm.correction,
            batch.old_logprobs_T[batch.scored_T],
            batch.behaviour_logprobs_T[batch.scored_T],
            batch.sequence_ids()[batch.scored_T],
            algorithm.correction_cap,
            None if window is None else (window[0], window[1]),
        )
        return replace(batch, advantages_T=batch.advantages_T * batch.column(weights_N)), metrics

    def _minibatches(self, step: int, batch: Batch, group_ids_B: Tensor) -> Iterator[Batch]:
        """What each optimizer step of this step is taken on: the whole batch or, by whole groups and in an order that is drawn anew
        for every pass, its parts."""
        config = self._config.batch
        if config.updates == 1:
            yield batch
            return
        members: dict[int, list[int]] = {}
        for sequence, group in enumerate(group_ids_B.tolist()):
            members.setdefault(group, []).append(sequence)
        parts = min(config.updates_per_step, len(members))
        for number in range(config.passes_per_step):
            order = list(members)
            random.Random(stable_hash("minibatches", self._config.run.seed, step, number)).shuffle(order)
            for part in range(parts):
                yield self._selected(batch, sorted(i for group in order[part::parts] for i in members[group]))

    def _selected(self, batch: Batch, sequences: Sequence[int]) -> Batch:
        """These sequences, with weights whose denominators count them alone."""
        if not sequences:
            return replace(batch, lengths=())
        config = self._config
        part, _ = batch.select(sequences)
        weights_T = token_weights(
            config.algorithm.aggregation, part.scored_T, part.lengths, config.sampling.max_new_tokens
        )
        return replace(part, weights_T=weights_T)


def _mismatch(batch: Batch) -> Tensor | None:
    """The learner's log-probability less the sampler's at the same weights, `[N]`, where it was taken before the updates."""
    if batch.old_logprobs_T is None or batch.behaviour_logprobs_T is None:
        return None
    return (batch.old_logprobs_T - batch.behaviour_logprobs_T)[batch.scored_T]
