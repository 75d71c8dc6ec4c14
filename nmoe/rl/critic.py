"""The critic of PPO, whose values are the baseline of the rewards in place of the other samples of a group.

Schulman et al. 2017 (arXiv:1707.06347), as used on language models by Ouyang et al. 2022 (arXiv:2203.02155). PPO is the loop of
`nmoe/rl/train.py` with this critic: `nmoe rl train CONFIG` with `algorithm.advantage = "gae"` and a [critic] table, as in
sort_ppo.toml.
"""

# Shapes: N scored tokens.

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from nmoe.config.commands import RLConfig
from nmoe.config.tables.algorithm import CriticSection
from nmoe.errors import UserError
from nmoe.learner.batch import Batch, token_weights
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import Objective, value_loss
from nmoe.learner.objectives.value import explained_variance
from nmoe.learner.optimizer import StepResult
from nmoe.learner.passes import PassResult
from nmoe.model.head import DESCRIPTION, Head, load_head
from nmoe.parallel.gang import everywhere
from nmoe.parallel.ranks import Ranks
from nmoe.recipes.setup import build_model, optimizer_settings
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.text.tokenizer import Tokenizer


def value_head(hidden_size: int, checkpoint: str | None) -> Head:
    """Loads the value head of a checkpoint, or creates one whose values are all 0 if the checkpoint has none. Raises UserError for
    a head of another width, and for a head that is no value head, such as a reward model's."""
    if checkpoint is not None and ((directory := resolve_checkpoint(Path(checkpoint))) / DESCRIPTION).exists():
        return load_head(directory, hidden_size, "value")
    return Head(hidden_size, 1, "value")


def critic_learner(config: RLConfig, tokenizer: Tokenizer, vocab_size: int, context_tokens: int) -> Learner:
    """Builds the learner of a critic that is a separate model, for a policy with this vocabulary and context. Raises UserError as
    `Critic.build` does."""
    section = config.critic
    assert section is not None, "a critic has a section"
    path = section.path or config.model.path
    assert path is not None, "the configuration requires a critic's checkpoint"
    settings = config.model.model_copy(update={"path": path, "shape": None, "expert_weights": "dequantized"})
    ranks = Ranks(config.parallel)
    model = build_model(settings, tokenizer, config.run.seed, balance=False, ranks=ranks)
    for name, least in (("vocab_size", vocab_size), ("context_tokens", context_tokens)):
        if getattr(model.config, name) < least:
            raise UserError(
                f"{path}: this critic's {name} is {getattr(model.config, name)} and the policy's {least}, "
                "so that it cannot read all that the policy writes; name another "
                "checkpoint in critic.path"
            )
    updates = config.batch.updates
    return Learner(
        model,
        optimizer_settings(config, updates).model_copy(update={"learning_rate": section.learning_rate}),
        config.run.steps * updates,
        config.batch.tokens_per_microbatch,
        ranks=ranks,
        head=value_head(model.config.hidden_size, path),
        head_only=True,
    )


class Critic:
    """Estimates the values of the policy's states and learns from the returns. It is a separate model, or a head on the policy's
    trunk, which then learns together with the policy from the sum of both losses."""

    def __init__(self, section: CriticSection, policy: Learner, own: Learner | None) -> None:
        """Wraps the learner that holds the critic. `own` is the learner of a separate model; None for a head on the policy's trunk,
        which is part of the learner `policy`."""
        assert (own is None) == section.shared, "a separate critic has a learner, and a shared one has none"
        self.section, self._policy, self.own = section, policy, own
        self._passes: list[tuple[Tensor, Tensor, Tensor]] = []
        self._steps: list[StepResult] = []

    @classmethod
    def build(cls, config: RLConfig, policy: Learner, tokenizer: Tokenizer) -> Critic | None:
        """Builds the critic of a run; None if the configuration has no [critic].

        Raises UserError if the vocabulary or context of a separate critic is smaller than the policy's, or if its checkpoint has a
        head of another width, or one that is no value head.
        """
        section = config.critic
        if section is None:
            return None
        if section.shared:
            return cls(section, policy, None)
        shape = policy.model.config
        return cls(
            section, policy, everywhere(critic_learner, config, tokenizer, shape.vocab_size, shape.context_tokens)
        )

    def with_values(self, batch: Batch) -> Batch:
        """Returns the batch with the column `old_values_T`: the critic's present value of each scored position's state."""
        return replace(batch, old_values_T=batch.column(self._values(batch)))

    def _values(self, batch: Batch) -> Tensor:
        if self.own is None:
            return self._policy.head_outputs(batch).result()[:, 0]
        return self.own.head_outputs(batch.without_routes()).result()[:, 0]

    def warming_up(self, step: int) -> bool:
        """Returns whether this step trains only the critic."""
        return step <= self.section.warmup_steps

    def shared_objective(self) -> Objective | None:
        """Returns the value loss of a head on the policy's trunk, to be added to the policy's loss; None for a separate critic."""
        return value_loss(self.section.clip, self.section.coef) if self.own is None else None

    def update(self, batch: Batch) -> None:
        """Takes one optimizer step of a separate critic on a mini-batch, on the mean loss over its tokens. Does nothing for a head
        on the policy's trunk."""
        if self.own is None:
            return
        batch = replace(batch.without_routes(), weights_T=token_weights("token", batch.scored_T, batch.lengths))
        result = self.own.forward_backward(batch, value_loss(self.section.clip)).result()
        self._steps.append(self.own.optim_step().result())
        self._observe(batch, result)

    def observe_policy(self, batch: Batch, result: PassResult) -> None:
        """Keeps the values of a training pass of the policy for `metrics`, where that pass trained a shared head too."""
        if self.own is None:
            self._observe(batch, result)

    def _observe(self, batch: Batch, result: PassResult) -> None:
        assert batch.returns_T is not None
        self._passes.append((result.tokens["value"], batch.returns_T[batch.scored_T], result.tokens["value_clipped"]))

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Returns the critic's metrics of the step's updates, and clears the values kept for them. `explained_variance` compares
        the returns with the values before the updates."""
        assert batch.returns_T is not None
        assert batch.old_values_T is not None
        returns_N, values_N = batch.returns_T[batch.scored_T], batch.old_values_T[batch.scored_T]
        values, targets, clipped = (torch.cat(columns).double() for columns in zip(*self._passes, strict=True))
        metrics = {
            "value_loss": float((values - targets).square().mean() / 2),
            "value_clip_ratio": float(clipped.mean()),
            "value_mean": float(values_N.double().mean()),
            "return_mean": float(returns_N.double().mean()),
            "explained_variance": explained_variance(values_N, returns_N),
        }
        if self._steps:
            metrics["critic_learning_rate"] = self._steps[-1].learning_rate
            metrics["critic_grad_norm"] = max(step.grad_norm or 0.0 for step in self._steps)
        self._passes, self._steps = [], []
        return metrics
