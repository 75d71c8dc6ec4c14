"""nmoe's side of the decode benchmark: the native engine over the learner's module."""

# Shapes: B sequences, T tokens of a prompt, V vocabulary, N sampled tokens.

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from decode_workload import PROMPT_TOKENS, Dtype, Generated, Logits, Run, make_prompts
from machine import Stopwatch
from side import answer

from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.learner.batch import Batch
from nmoe.learner.passes import batch_logprobs
from nmoe.model.checkpoint import load_model
from nmoe.model.moe import RouterTrace
from nmoe.model.packed import PackedAttention
from nmoe.model.transformer import Transformer
from nmoe.recipes.setup import keep_freed_memory
from nmoe.rl.experience import policy_batch
from nmoe.trajectory import Trajectory
from nmoe.types import Grade, Problem, Sample, Sampling, Turn

_DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
_TOKENS_PER_MICROBATCH = 16384
_CHECKED = 64  # sequences of a run that the learner recomputes


class NmoeDecode:
    """One model per dtype and one engine per model and number of sequences, made when first asked for."""

    def __init__(self, directory: Path) -> None:
        keep_freed_memory()  # as every recipe does
        self.directory = directory
        self.models: dict[Dtype, Transformer] = {}
        self.engines: dict[tuple[Dtype, int], NativeEngine] = {}

    def model(self, dtype: Dtype) -> Transformer:
        if dtype not in self.models:
            self.models[dtype] = load_model(self.directory, _DTYPES[dtype])
        return self.models[dtype]

    def reply(self, question: Run | Logits) -> object:
        return self.generate(question) if isinstance(question, Run) else self.logits(question)

    def generate(self, run: Run) -> Generated:
        model, key = self.model(run.dtype), (run.dtype, run.sequences)
        if key not in self.engines:
            self.engines[key] = NativeEngine(model, max_sequences=run.sequences)
        engine, prompts = self.engines[key], make_prompts(run.sequences, run.seed)
        with Stopwatch() as watch:
            samples = engine.run(_generate(engine, prompts, run))
        return Generated(
            watch.seconds,
            watch.cpu_seconds,
            watch.others_cores,
            [sample.token_ids for sample in samples],
            [sample.logprobs for sample in samples],
            _mismatch(model, prompts[:_CHECKED], samples[:_CHECKED]),
        )

    @torch.no_grad()
    def logits(self, question: Logits) -> object:
        model, prompts_BT = self.model("fp32"), torch.tensor(make_prompts(question.sequences))
        lengths = [PROMPT_TOKENS] * question.sequences
        positions_T = torch.arange(PROMPT_TOKENS).repeat(question.sequences)
        attend = PackedAttention(lengths, prompts_BT.device)
        states_TD = model(prompts_BT.flatten(), positions_T, attend, RouterTrace())
        return model.logits(states_TD).view(question.sequences, PROMPT_TOKENS, -1).numpy()


async def _generate(engine: NativeEngine, prompts: list[list[int]], run: Run) -> list[Sample]:
    """One request per prompt, no stop ids."""
    answers = await asyncio.gather(
        *(
            engine.generate(
                Request(tuple(prompt), 1, Sampling(run.new_tokens, seed=run.seed * len(prompts) + row), str(row))
            )
            for row, prompt in enumerate(prompts)
        )
    )
    return [sample for samples in answers for sample in samples]


def _mismatch(model: Transformer, prompts: list[list[int]], samples: list[Sample]) -> tuple[float, float]:
    """Mean and largest absolute difference of the sampler's log-probabilities and the learner's recomputation."""
    batch = _batch(prompts, samples)
    assert batch.behaviour_logprobs_T is not None
    recomputed_N = batch_logprobs(model, batch, _TOKENS_PER_MICROBATCH, temperature=1.0)
    difference_N = (recomputed_N - batch.behaviour_logprobs_T[batch.scored_T]).abs()
    return float(difference_N.mean()), float(difference_N.max())


def _batch(prompts: list[list[int]], samples: list[Sample]) -> Batch:
    problem = Problem("benchmark", "benchmark", "", "", "benchmark")
    grade = Grade(0.0, {}, "ok", {}, None)
    trajectories = [
        Trajectory(problem, row, tuple(prompt), (Turn((), sample),), grade, Sampling(len(sample.token_ids)))
        for row, (prompt, sample) in enumerate(zip(prompts, samples, strict=True))
    ]
    return policy_batch(trajectories, torch.zeros(len(samples)), "token", len(samples[0].token_ids))


def serve(connection: Connection, directory: Path) -> None:
    """Answers what is asked about the checkpoint in `directory`."""
    answer(connection, NmoeDecode(directory).reply)
