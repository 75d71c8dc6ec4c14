"""nmoe's side of the GRPO benchmark: the four primitives, as the recipe calls them.

Completions of one length per prompt are one request of 8 samples, which share a prefill. Lengths that differ within a
prompt are forced by one request per row, whose limit is the row's length; these share nothing, which costs nmoe time.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from grpo_workload import (
    ADAM_BETAS,
    ADAM_EPS,
    CLIP_EPS,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    MAX_NEW_TOKENS,
    N_COMPLETIONS,
    WEIGHT_DECAY,
    GradedBatch,
    make_model,
    make_prompts,
    reward,
)
from side import answer

from nmoe.config.tables.optimizer import OptimizerSection
from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.learner.advantages import grpo
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import clip
from nmoe.model.checkpoint import load_model
from nmoe.recipes.setup import keep_freed_memory
from nmoe.rl.experience import policy_batch
from nmoe.trajectory import Trajectory
from nmoe.types import Grade, Problem, Sample, Sampling, Turn

TOKENS_PER_MICROBATCH = 16384


class NmoeGrpo:
    """One learner and one engine over the same weights, in a process set up as every recipe does it; every `step` is a whole
    GRPO step."""

    def __init__(self) -> None:
        keep_freed_memory()
        with tempfile.TemporaryDirectory() as directory:
            make_model().save_pretrained(directory)
            model = load_model(Path(directory))
        settings = OptimizerSection(
            learning_rate=LEARNING_RATE,
            min_lr_ratio=1.0,
            weight_decay=WEIGHT_DECAY,
            beta1=ADAM_BETAS[0],
            beta2=ADAM_BETAS[1],
            eps=ADAM_EPS,
            max_grad_norm=MAX_GRAD_NORM,
        )
        self.learner = Learner(model, settings, total_steps=10**6, tokens_per_microbatch=TOKENS_PER_MICROBATCH)
        self.engine = NativeEngine(model, max_sequences=64)
        self.objective = clip(CLIP_EPS, CLIP_EPS)
        self.prompts = [tuple(prompt) for prompt in make_prompts()]
        self.steps = 0

    def step(self, lengths: Sequence[int]) -> float:
        """Samples rows of exactly these lengths, grades, updates and publishes; returns the seconds it took."""
        began = time.perf_counter()
        samples = self.engine.run(self._generate(lengths))
        rewards_B = torch.tensor([reward(sample.token_ids) for sample in samples])
        groups_B = torch.arange(len(self.prompts)).repeat_interleave(N_COMPLETIONS)
        advantages_B = grpo(rewards_B, groups_B)
        batch = self._batch(samples, advantages_B)
        result = self.learner.forward_backward(batch, self.objective).result()
        self.learner.optim_step().result()
        self.learner.publish(self.engine).result()
        seconds = time.perf_counter() - began
        self.steps += 1
        self._samples, self._advantages, self._log_ratio = samples, advantages_B, result.tokens["log_ratio"].abs()
        return seconds

    def mismatch(self) -> tuple[float, float]:
        """Mean and largest absolute difference of sampler's and learner's log-probabilities in the last step."""
        return float(self._log_ratio.mean()), float(self._log_ratio.max())

    def last_batch(self) -> GradedBatch:
        prompts = [list(prompt) for prompt in self.prompts for _ in range(N_COMPLETIONS)]
        return GradedBatch(prompts, [sample.token_ids for sample in self._samples], self._advantages.tolist())

    def loss_and_gradient_norm(self, batch: GradedBatch) -> tuple[float, float]:
        """Loss and unclipped gradient norm of a given batch, on-policy: the behaviour is the policy itself."""
        samples = [Sample(ids, [0.0] * len(ids), [0] * len(ids), "length") for ids in batch.completion_ids]
        packed = self._batch(samples, torch.tensor(batch.advantages), batch.prompt_ids)
        behaviour_T = torch.zeros_like(packed.weights_T)
        behaviour_T[packed.scored_T] = self.learner.logprobs(packed).result()
        packed = replace(packed, behaviour_logprobs_T=behaviour_T)
        loss = self.learner.forward_backward(packed, self.objective).result().loss
        return loss, self.learner.optim_step().result().grad_norm

    async def _generate(self, lengths: Sequence[int]) -> list[Sample]:
        """Samples of all rows, in order; no stop ids, so that each runs to its length."""
        requests = []
        for place, prompt in enumerate(self.prompts):
            rows = lengths[place * N_COMPLETIONS : (place + 1) * N_COMPLETIONS]
            shared = len(set(rows)) == 1
            for row, length in enumerate(rows[:1] if shared else rows):
                seed = (self.steps * len(self.prompts) + place) * N_COMPLETIONS + row
                samples = N_COMPLETIONS if shared else 1
                requests.append(Request(prompt, samples, Sampling(length, seed=seed), f"{place}/{row}"))
        answers = await asyncio.gather(*(self.engine.generate(request) for request in requests))
        return [sample for answer in answers for sample in answer]

    def _batch(
        self, samples: Sequence[Sample], advantages_B: torch.Tensor, prompts: Sequence[Sequence[int]] | None = None
    ) -> Batch:
        prompts = prompts or [prompt for prompt in self.prompts for _ in range(N_COMPLETIONS)]
        problem = Problem("benchmark", "benchmark", "", "", "benchmark")
        grade = Grade(0.0, {}, "ok", {}, None)
        trajectories = [
            Trajectory(problem, row, tuple(prompt), (Turn((), sample),), grade, Sampling(MAX_NEW_TOKENS))
            for row, (prompt, sample) in enumerate(zip(prompts, samples, strict=True))
        ]
        return policy_batch(trajectories, advantages_B, "token", MAX_NEW_TOKENS)


@dataclass(frozen=True)
class NmoeStep:
    """What nmoe's process says of one step."""

    seconds: float
    batch: GradedBatch
    mismatch_mean: float
    mismatch_max: float


def serve(connection: Connection) -> None:
    """Takes a step with the completion lengths asked for, and answers with what it took and trained on."""
    side = NmoeGrpo()

    def step(lengths: list[int]) -> NmoeStep:
        return NmoeStep(side.step(lengths), side.last_batch(), *side.mismatch())

    answer(connection, step)
