"""Builds the policy of a run: the learner that trains it, and the loss that [algorithm] names."""

from __future__ import annotations

import torch
from torch import Tensor

from nmoe.config.commands import RLConfig
from nmoe.config.registry import LOSSES
from nmoe.config.tables.algorithm import AlgorithmSection
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import (
    Objective,
    Outputs,
    Scored,
    cispo,
    clip,
    dppo,
    entropy_bonus,
    gspo,
    reference_divergence,
    total,
)
from nmoe.learner.objectives.base import log_ratio
from nmoe.parallel.ranks import Ranks
from nmoe.recipes.setup import add_adapter, build_model, optimizer_settings
from nmoe.rl.critic import Critic, value_head
from nmoe.text.tokenizer import Tokenizer


def policy_learner(config: RLConfig, tokenizer: Tokenizer) -> Learner:
    """Builds the policy's learner: a model, with a LoRA adapter if only that is trained, and with a value head if the critic shares
    the policy's trunk. The learning-rate schedule begins after the critic's warm-up steps."""
    ranks = Ranks(config.parallel)
    model = build_model(config.model, tokenizer, config.run.seed, balance=False, ranks=ranks)
    lora = add_adapter(config, model)
    critic, updates = config.critic, config.batch.updates
    head, head_learning_rate, first = None, None, 0
    if critic is not None:
        first = critic.warmup_steps
        if critic.shared:
            head, head_learning_rate = value_head(model.config.hidden_size, config.model.path), critic.learning_rate
    return Learner(
        model,
        optimizer_settings(config, updates, first),
        (config.run.steps - first) * updates,
        config.batch.tokens_per_microbatch,
        config.sampling.temperature,
        lora,
        ranks=ranks,
        head=head,
        head_learning_rate=head_learning_rate,
    )


def _measured(own: Objective) -> Objective:
    """Wraps a user's loss, to add the statistics that metrics need (`log_ratio`, `clipped`) where the loss does not return them."""

    def objective(outputs: Outputs, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        weighted_sum, statistics = own(outputs, scored)
        raw_N = log_ratio(outputs, scored).detach()
        return weighted_sum, {"log_ratio": raw_N, "clipped": torch.zeros_like(raw_N), **statistics}

    return objective


def own_loss(algorithm: AlgorithmSection) -> Objective | None:
    """Returns the built-in policy loss that [algorithm] names, without penalties; None if it names a user's loss."""
    low, high = algorithm.clip_range
    if algorithm.loss == "cispo":
        return cispo(high)
    assert low is not None, "every loss but cispo has a lower bound"
    if algorithm.loss not in LOSSES.builtin:
        return None
    if algorithm.loss == "gspo":
        return gspo(low, high)
    if algorithm.loss == "dppo":
        return dppo(low, high)
    return clip(low, high, algorithm.dual_clip_bound if algorithm.loss == "dual_clip" else None)


def policy_objective(algorithm: AlgorithmSection, critic: Critic | None = None) -> Objective:
    """Returns the policy loss, plus the KL penalty, the entropy bonus, and the value loss of a critic on the policy's trunk."""
    parts = [own_loss(algorithm) or _measured(LOSSES.get(algorithm.loss)(algorithm))]
    if algorithm.kl_coef > 0 and algorithm.kl_in == "loss":
        parts.append(
            reference_divergence(algorithm.kl_coef, algorithm.kl_estimator or "k3", algorithm.kl_importance_weights)
        )
    if algorithm.entropy_coef > 0:
        parts.append(entropy_bonus(algorithm.entropy_coef))
    if critic is not None and (value := critic.shared_objective()) is not None:
        parts.append(value)
    return total(*parts)
