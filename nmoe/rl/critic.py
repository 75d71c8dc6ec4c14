"""PPO: the loop of `nmoe/rl/train.py` with a critic, whose values take the place of the group that samples are compared with.

Schulman et al. 2017 (arXiv:1707.06347), as used on language models by Ouyang et al. 2022 (arXiv:2203.02155). The loop, the policy's
loss and the checkpoints are those of every policy gradient here; this file is what PPO has beside them. `nmoe rl train CONFIG` with
`algorithm.advantage = "gae"` and a [critic] table: configs/sort_ppo.toml.
"""

# Shapes: N scored tokens.

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from nmoe.config.commands.rl import RLConfig
from nmoe.config.tables.critic import CriticSection
from nmoe.errors import UserError
from nmoe.learner.aggregation import token_weights
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner, PassResult
from nmoe.learner.objectives import Objective, value_loss
from nmoe.learner.objectives.value import explained_variance
from nmoe.learner.optimizer import StepResult
from nmoe.model.config import ModelConfig
from nmoe.model.head import DESCRIPTION, Head, load_head
from nmoe.model.transformer import Transformer
from nmoe.recipes.setup import build_model, optimizer_settings
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.text.tokenizer import Tokenizer

DIRECTORY = "critic"


def value_head(hidden_size: int, checkpoint: str | None) -> Head:
    """The value head of a checkpoint that has one, else a new one, whose values are all 0. Raises UserError for a head of another
    width or kind."""
    if checkpoint is not None and ((directory := resolve_checkpoint(Path(checkpoint))) / DESCRIPTION).exists():
        return load_head(directory, hidden_size, "value")
    return Head(hidden_size, 1, "value")


def build_critic(config: RLConfig, tokenizer: Tokenizer, policy: ModelConfig) -> tuple[Transformer, Head] | None:
    """The critic's own model and head; None where there is no critic, or where it is a head on the policy's trunk.

    Raises UserError where its checkpoint can not read what the policy writes, or has a head of another width."""
    section = config.critic
    if section is None or section.shared:
        return None
    path = section.path or config.model.path
    assert path is not None, "the configuration asks for a critic's checkpoint"
    settings = config.model.model_copy(update={"path": path, "shape": None})
    model = build_model(settings, tokenizer, config.run.seed, balance=False)
    for name in ("vocab_size", "context_tokens"):
        if getattr(model.config, name) < getattr(policy, name):
            raise UserError(
                f"{path}: this critic's {name} is {getattr(model.config, name)} and the policy's {getattr(policy, name)}, so "
                "that it can not read all that the policy writes; name another checkpoint in critic.path"
            )
    return model, value_head(model.config.hidden_size, path)


class Critic:
    """Values of the states that the policy chose in, and their training: on a model of its own beside the policy, or as a head on
    the policy's trunk, which then learns with the policy, from the sum of both losses."""

    def __init__(self, config: RLConfig, policy: Learner, own: tuple[Transformer, Head] | None) -> None:
        assert config.critic is not None
        self._section: CriticSection = config.critic
        self._policy = policy
        self._passes: list[tuple[Tensor, Tensor, Tensor]] = []
        self._steps: list[StepResult] = []
        self._learner: Learner | None = None
        if own is not None:
            model, head = own
            updates = config.batch.updates
            settings = optimizer_settings(config, updates)
            self._learner = Learner(
                model,
                replace(settings, learning_rate=self._section.learning_rate),
                config.run.steps * updates,
                config.batch.tokens_per_microbatch,
                head=head,
                head_only=True,
            )

    def with_values(self, batch: Batch) -> Batch:
        """The batch with the present values of its states."""
        return replace(batch, old_values_T=batch.column(self._values(batch)))

    def _values(self, batch: Batch) -> Tensor:
        if self._learner is None:
            return self._policy.head_outputs(batch).result()[:, 0]
        return self._learner.head_outputs(batch.without_routes()).result()[:, 0]

    def warming_up(self, step: int) -> bool:
        """Whether the policy still waits for its critic."""
        return step <= self._section.warmup_steps

    def shared_objective(self) -> Objective | None:
        """What the policy's learner minimises beside the policy's loss, where the critic is a head on its trunk."""
        return value_loss(self._section.clip, self._section.coef) if self._learner is None else None

    def update(self, batch: Batch) -> None:
        """One optimizer step of the critic's own model on a mini-batch, the mean over its tokens; none for a shared head."""
        if self._learner is None:
            return
        batch = replace(batch.without_routes(), weights_T=token_weights("token", batch.scored_T, batch.lengths))
        result = self._learner.forward_backward(batch, value_loss(self._section.clip)).result()
        self._steps.append(self._learner.optim_step().result())
        self._observe(batch, result)

    def observe_policy(self, batch: Batch, result: PassResult) -> None:
        """Takes in a pass of the policy's learner, in which a shared head was trained too."""
        if self._learner is None:
            self._observe(batch, result)

    def _observe(self, batch: Batch, result: PassResult) -> None:
        assert batch.returns_T is not None
        self._passes.append((result.tokens["value"], batch.returns_T[batch.scored_T], result.tokens["value_clipped"]))

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Figures of the step's updates; how well the critic knew the returns is taken from before them."""
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

    def save(self, directory: Path) -> None:
        if self._learner is not None:
            (directory / DIRECTORY).mkdir()
            self._learner.save(directory / DIRECTORY)

    def load(self, directory: Path) -> None:
        if self._learner is not None:
            self._learner.load(directory / DIRECTORY)
