"""On-policy distillation: the policy samples, and the advantage of each token is its log-probability under a teacher, minus its
log-probability under the policy.

Agarwal et al. 2024 (arXiv:2306.13649). `nmoe rl train CONFIG` with a [distillation] table runs the loop of `nmoe/rl/train.py`, with
the teacher's advantages in place of those from rewards, or added to them. The teacher can run on any engine that scores tokens.
"""

# Shapes: T predicting positions, N scored ones.

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from nmoe.config.commands import RLConfig
from nmoe.config.tables.algorithm import DistillationSection
from nmoe.engine.native.engine import NativeEngine
from nmoe.engine.remote.served import served_engine
from nmoe.errors import UserError
from nmoe.learner.batch import Batch
from nmoe.learner.objectives.base import LOG_RATIO_CLAMP
from nmoe.model.config import ModelConfig
from nmoe.recipes.setup import build_model, load_tokenizer
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.text.tokenizer import Tokenizer


def teacher_advantages(logprobs_T: Tensor, teacher_logprobs_T: Tensor, scored_T: Tensor, coef: float) -> Tensor:
    """Computes the advantages of distillation, `-coef * (log pi(x_t) - log teacher(x_t))` at every scored position, with a discount
    of 0 (Agarwal et al. 2024, arXiv:2306.13649, with reverse KL; as a policy gradient: Lu 2025, "On-policy distillation").
    `logprobs_T` come from the policy that sampled.

    In expectation over the sampled token its policy gradient equals the gradient of `-coef * KL(pi || teacher)` at each state that
    the policy reached. In imitation, by contrast, the student learns from the states of the teacher.
    """
    difference_T = (logprobs_T - teacher_logprobs_T).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return torch.where(scored_T, -coef * difference_T, 0.0)


class ScoringEngine(Protocol):
    """The part of an inference engine's interface that a teacher uses: scoring given tokens."""

    def run(self, coroutine: Coroutine[Any, Any, list[list[float]]]) -> list[list[float]]: ...

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]: ...


class Teacher:
    """A frozen model on a separate engine, whose log-probabilities the policy learns to match."""

    def __init__(self, section: DistillationSection, engine: ScoringEngine, temperature: float) -> None:
        """Keeps the teacher's engine. `temperature` is the policy's sampling temperature. The teacher's log-probabilities are
        computed at it, so that a policy with the teacher's logits is optimal."""
        self._section, self._engine, self._temperature = section, engine, temperature

    @classmethod
    def build(cls, config: RLConfig, policy: ModelConfig, tokenizer: Tokenizer, stack: ExitStack) -> Teacher | None:
        """Loads the teacher that [distillation] names, or reaches the servers that have it until `stack` ends; None without that
        table. Raises UserError if its tokens differ from the policy's, if its context is shorter, and for servers that cannot
        score its tokens."""
        section = config.distillation
        if section is None:
            return None
        settings = config.model.model_copy(
            update={
                "path": section.teacher,
                "shape": None,
                "tokenizer": None,
                "expert_profile": None,
                "expert_weights": "dequantized",
            }
        )
        if not load_tokenizer(settings).same_ids(tokenizer):
            raise UserError(
                f"{section.teacher}: the teacher in distillation.teacher has other tokens than the policy, or other ids for them; "
                "it can only judge tokens that it knows"
            )
        engine: ScoringEngine
        if section.urls:
            fleet = stack.enter_context(
                served_engine(section.urls, resolve_checkpoint(Path(section.teacher)), print, "distillation.urls: ")
            )
            (first, *_), engine = fleet.served(), fleet
            if first.engine != "nmoe":
                raise UserError(
                    f"distillation.urls: {first.engine} cannot score given tokens; serve the teacher by "
                    "python -m nmoe.engine.server"
                )
            context = first.context_tokens
        else:
            model = build_model(settings, tokenizer, config.run.seed).requires_grad_(False)
            engine = NativeEngine(model, config.engine.max_sequences, config.engine.cache_mb)
            context = model.config.context_tokens
        if context < policy.context_tokens:
            raise UserError(
                f"{section.teacher}: this teacher's context is {context} tokens and the policy's "
                f"{policy.context_tokens}, so that it cannot read all that the policy writes; name another distillation.teacher"
            )
        return cls(section, engine, config.sampling.temperature)

    def advise(self, batch: Batch) -> tuple[Batch, Tensor, dict[str, float]]:
        """Replaces the batch's advantages A by `reward_coef` times A plus the teacher's advantages (`teacher_advantages`). Returns
        the batch, the new advantages at the scored tokens, `[N]`, and the metric `teacher_kl`, the mean of `log pi - log teacher`
        over them. Needs `behaviour_logprobs` or `old_logprobs`."""
        logprobs_T = batch.behaviour_logprobs_T if batch.old_logprobs_T is None else batch.old_logprobs_T
        assert logprobs_T is not None, "a batch of samples has their behaviour log-probabilities"
        assert batch.advantages_T is not None, "advantages from rewards come first"
        teacher_T = self._logprobs(batch)
        own_T = teacher_advantages(logprobs_T, teacher_T, batch.scored_T, self._section.coef)
        advantages_T = own_T + self._section.reward_coef * batch.advantages_T
        divergence_N = (logprobs_T - teacher_T)[batch.scored_T].double()
        metrics = {"teacher_kl": float(divergence_N.mean())}
        return replace(batch, advantages_T=advantages_T), advantages_T[batch.scored_T], metrics

    def _logprobs(self, batch: Batch) -> Tensor:
        """Computes the teacher's log-probability of every position's target, `[T]`."""
        inputs, targets = batch.inputs_T.split(list(batch.lengths)), batch.targets_T.split(list(batch.lengths))
        sequences = [[*read.tolist(), int(then[-1])] for read, then in zip(inputs, targets, strict=True) if len(read)]

        async def score() -> list[list[float]]:
            return await asyncio.gather(*(self._engine.score(ids, self._temperature) for ids in sequences))

        return torch.tensor([value for values in self._engine.run(score()) for value in values])
