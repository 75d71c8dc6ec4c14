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
    DTYPES,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    N_COMPLETIONS,
    TINY,
    WEIGHT_DECAY,
    Dtype,
    GradedBatch,
    Workload,
    make_model,
    make_prompts,
    reward,
)
from side import answer

from nmoe.config.tables.model import OptimizerSection
from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import clip
from nmoe.model.checkpoint import load_model
from nmoe.recipes.setup import keep_freed_memory
from nmoe.rl.advantages import Grpo
from nmoe.rl.experience import policy_batch
from nmoe.trajectory import Trajectory
from nmoe.types import Grade, Problem, Sample, Sampling, Turn


class NmoeGrpo:
    """One learner and one engine over the same weights, in a process set up as every recipe does it; every `step` is a whole
    GRPO step."""

    def __init__(self, workload: Workload = TINY, dtype: Dtype = "fp32") -> None:
        keep_freed_memory()
        with tempfile.TemporaryDirectory() as directory:
            make_model(workload).save_pretrained(directory)
            model = load_model(Path(directory), DTYPES[dtype])
        settings = OptimizerSection(
            learning_rate=LEARNING_RATE,
            min_lr_ratio=1.0,
            weight_decay=WEIGHT_DECAY,
            beta1=ADAM_BETAS[0],
            beta2=ADAM_BETAS[1],
            eps=ADAM_EPS,
            max_grad_norm=MAX_GRAD_NORM,
        )
        tokens = workload.tokens_at_once
        self.learner = Learner(model, settings, total_steps=10**6, tokens_per_microbatch=tokens)
        self.engine = NativeEngine(model, max_sequences=workload.rows)
        self.objective = clip(CLIP_EPS, CLIP_EPS)
        self.prompts = [tuple(prompt) for prompt in make_prompts(workload)]
        self.steps = 0

    def step(self, lengths: Sequence[int]) -> float:
        """Samples rows of exactly these lengths, grades, updates and publishes; returns the seconds it took."""
        began, cpu_began = time.perf_counter(), time.process_time()
        samples = self.engine.run(self._generate(lengths))
        self.sampling_cpu_seconds = time.process_time() - cpu_began
        rewards_B = torch.tensor([reward(sample.token_ids) for sample in samples])
        groups_B = torch.arange(len(self.prompts)).repeat_interleave(N_COMPLETIONS)
        advantages_B = Grpo().of_samples(rewards_B, groups_B)
        batch = self._batch(samples, advantages_B)
        result = self.learner.forward_backward(batch, self.objective).result()
        self.learner.optim_step().result()
        self.learner.publish(self.engine).result()
        seconds, self.cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
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
            Trajectory(problem, row, tuple(prompt), (Turn((), sample),), grade, Sampling(len(sample.token_ids)))
            for row, (prompt, sample) in enumerate(zip(prompts, samples, strict=True))
        ]
        return policy_batch(trajectories, advantages_B, "token", max(len(sample.token_ids) for sample in samples))


@dataclass(frozen=True)
class NmoeStep:
    """What nmoe's process says of one step."""

    seconds: float
    cpu_seconds: float
    sampling_cpu_seconds: float
    batch: GradedBatch
    mismatch_mean: float
    mismatch_max: float


def serve(connection: Connection, workload: Workload, dtype: Dtype) -> None:
    """Takes a step with the completion lengths asked for, and answers with what it took and trained on."""
    side = NmoeGrpo(workload, dtype)

    def step(lengths: list[int]) -> NmoeStep:
        seconds = side.step(lengths)
        return NmoeStep(seconds, side.cpu_seconds, side.sampling_cpu_seconds, side.last_batch(), *side.mismatch())

    answer(connection, step)
