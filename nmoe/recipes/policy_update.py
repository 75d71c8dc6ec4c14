"""What updates the policy: graded groups become advantages and a batch, the batch a gradient, the gradient a step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from nmoe.config.run import RLConfig
from nmoe.learner.advantages import ADVANTAGES
from nmoe.learner.batch import Batch
from nmoe.learner.forward import batch_logprobs
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import clip, reference_divergence, total
from nmoe.model.transformer import Transformer
from nmoe.recipes.policy_batch import policy_batch
from nmoe.recipes.policy_metrics import update_metrics
from nmoe.rl.rollout.trajectory import Group


class PolicyUpdate:
    """One optimizer step of a learner on the groups of a step."""

    def __init__(self, config: RLConfig, learner: Learner, reference: Transformer | None) -> None:
        """`reference` is the policy before training; None where there is no divergence, or where an adapter is trained, whose base
        is the reference."""
        self._config, self._learner, self._reference = config, learner, reference
        algorithm = config.algorithm
        parts = [clip(algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip)]
        if algorithm.kl_coef > 0:
            parts.append(reference_divergence(algorithm.kl_coef, algorithm.kl_estimator))
        self._objective = total(*parts)

    def update(self, groups: Sequence[Group]) -> dict[str, float]:
        """Takes the step and returns its metrics."""
        config = self._config
        trajectories = [trajectory for group in groups for trajectory in group.trainable]
        rewards_B = torch.tensor([t.grade.score for t in trajectories])
        group_ids_B = torch.tensor([place for place, group in enumerate(groups) for _ in group.trainable])
        advantages_B = ADVANTAGES[config.algorithm.advantage](rewards_B, group_ids_B)
        batch = policy_batch(trajectories, advantages_B, config.algorithm.aggregation, config.sampling.max_new_tokens)
        if config.algorithm.kl_coef > 0:
            batch = batch.with_reference(self._reference_logprobs(batch))
        result = self._learner.forward_backward(batch, self._objective).result()
        step = self._learner.optim_step().result()
        return update_metrics(result, step, advantages_B)

    def _reference_logprobs(self, batch: Batch) -> Tensor:
        """Those of the policy before training or, where an adapter is trained, of the base without it."""
        config, lora = self._config, self._learner.lora
        with lora.disabled() if lora is not None else nullcontext(self._reference) as reference:
            assert reference is not None, "a run with a divergence has a reference"
            return batch_logprobs(
                reference,
                batch.without_routes(),
                config.batch.tokens_per_microbatch,
                config.sampling.temperature,
            )
