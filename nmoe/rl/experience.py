"""From graded groups to what the policy learns from: a batch with every column that its loss and its critic need."""

# Shapes: S sequences, N scored tokens.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from nmoe.config.commands.rl import RLConfig
from nmoe.config.tables.algorithm import AlgorithmSection
from nmoe.learner.batch import Batch
from nmoe.learner.correction import correction_weights
from nmoe.learner.learner import Learner
from nmoe.rl.advantages import reward_divergence, with_advantages
from nmoe.rl.batch import policy_batch, selected
from nmoe.rl.critic import Critic
from nmoe.rl.reference import Reference
from nmoe.rl.rewards import group_ids
from nmoe.rl.teacher import Teacher
from nmoe.types import Group


@dataclass(frozen=True)
class Experience:
    """The judged samples of a step, less those that were cut where they are masked, and the group of each of their sequences.
    `advantages` are those to take figures of: of samples where the estimator is one over samples, else of tokens; before a
    correction."""

    batch: Batch
    group_ids_S: Tensor
    advantages: Tensor
    metrics: dict[str, float]

    @property
    def mismatch(self) -> Tensor | None:
        """The learner's log-probability less the sampler's at the same weights, `[N]`, where it was taken before the updates."""
        batch = self.batch
        if batch.old_logprobs_T is None or batch.behaviour_logprobs_T is None:
            return None
        return (batch.old_logprobs_T - batch.behaviour_logprobs_T)[batch.scored_T]


class Experiences:
    """Asks reference, critic and teacher of what was sampled, and estimates its advantages."""

    def __init__(
        self,
        config: RLConfig,
        learner: Learner,
        reference: Reference | None,
        critic: Critic | None,
        token_limit: int,
        teacher: Teacher | None,
    ) -> None:
        self._config, self._learner, self._reference = config, learner, reference
        self._critic, self._token_limit, self._teacher = critic, token_limit, teacher
        # After the first update the learner is no longer what the sampler was, and its ratio is to itself as it began.
        self._keeps_old = config.batch.updates > 1 or config.algorithm.correction != "none"

    def of(self, groups: Sequence[Group]) -> Experience | None:
        """None where every sample was cut, and those are masked."""
        config, metrics = self._config, dict[str, float]()
        trajectories = [trajectory for group in groups for trajectory in group.trainable]
        batch = policy_batch(trajectories, None, config.algorithm.aggregation, config.sampling.max_new_tokens)
        if self._reference is not None:
            batch = batch.with_reference(self._reference.logprobs(batch))
        if self._keeps_old:
            batch = replace(batch, old_logprobs_T=batch.column(self._learner.logprobs(batch).result()))
        if self._critic is not None:
            batch = self._critic.with_values(batch)
        batch, advantages = with_advantages(batch, groups, config, self._token_limit)
        if self._teacher is not None:
            batch, advantages, metrics = self._teacher.advise(batch)
        ids_S = group_ids(groups)[batch.sample_ids()]
        if config.algorithm.mask_truncated:
            ended = [i for i, sample in enumerate(batch.sample_ids().tolist()) if not trajectories[sample].truncated]
            if not ended:
                return None
            batch = selected(batch, ended, config.algorithm.aggregation, config.sampling.max_new_tokens)
            ids_S = ids_S[ended]
        if config.algorithm.correction != "none":
            batch, corrected = _corrected(batch, config.algorithm)
            metrics |= corrected
        if (divergence_T := reward_divergence(batch, config.algorithm)) is not None:
            mean = divergence_T[batch.scored_T].double().mean()
            metrics["reference_kl"] = float(mean) / -config.algorithm.kl_coef
        return Experience(batch, ids_S, advantages, metrics)


def _corrected(batch: Batch, algorithm: AlgorithmSection) -> tuple[Batch, dict[str, float]]:
    """The batch with the weights for a sampler that was not the learner in its advantages, and their figures."""
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
