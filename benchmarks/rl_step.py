"""Times sampling and learning of one reinforcement-learning step of the speedrun's size, as older processors would run it.

    python benchmarks/rl_step.py

A model of the speedrun's shape with exact numerics: 16 prompts of 24 tokens, 16 samples of 48 tokens each, then one update on all
of them. It runs with this machine's instructions, held to AVX2, and without a C++ compiler (`KERNELS` of speedrun_seeds.py), each
in processes of its own that take turns. Prints the least CPU seconds of each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import torch
from machine import machine, versions
from speedrun_seeds import KERNELS

from nmoe.config.packaged import CONFIGS
from nmoe.config.tables.model import OptimizerSection
from nmoe.engine.api import Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import clip
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.recipes.setup import keep_freed_memory
from nmoe.rl.advantages import Grpo
from nmoe.rl.experience import policy_batch
from nmoe.trajectory import Trajectory
from nmoe.types import Grade, Problem, Sample, Sampling, Turn

VOCABULARY = 710  # the speedrun's tokenizer
PROMPTS, PROMPT_TOKENS, SAMPLES, NEW_TOKENS = 16, 24, 16, 48


def steps(count: int, clock: Callable[[], float] = time.process_time) -> list[dict[str, float]]:
    """Seconds of sampling and of learning in each of `count` steps of a fresh model, after one to warm up, and the gradient's norm.
    Seconds are those of `clock`, by default of the CPU."""
    keep_freed_memory()
    shape = tomllib.loads((CONFIGS / "speedrun_base.toml").read_text())["model"]["shape"]
    model = Transformer(ModelConfig(vocab_size=VOCABULARY, **shape)).initialize(0).set_numerics("exact")
    engine = NativeEngine(model, max_sequences=512)
    learner = Learner(model, OptimizerSection(learning_rate=4e-4), total_steps=10**6, tokens_per_microbatch=16384)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(VOCABULARY, (PROMPTS, PROMPT_TOKENS), generator=generator).tolist()
    groups_B = torch.arange(PROMPTS).repeat_interleave(SAMPLES)
    problem, grade = Problem("benchmark", "benchmark", "", "", "benchmark"), Grade(0.0, {}, "ok", {}, None)

    async def sample(step: int) -> list[Sample]:
        sampling = Sampling(NEW_TOKENS, seed=step)
        requests = (Request(tuple(prompt), SAMPLES, sampling, str(i)) for i, prompt in enumerate(prompts))
        return [one for answer in await asyncio.gather(*map(engine.generate, requests)) for one in answer]

    seconds = []
    for step in range(count + 1):
        began = clock()
        samples = engine.run(sample(step))
        sampled = clock()
        advantages_B = Grpo().of_samples(torch.rand(len(samples), generator=generator), groups_B)
        trajectories = [
            Trajectory(problem, i, tuple(prompts[i // SAMPLES]), (Turn((), one),), grade, Sampling(NEW_TOKENS))
            for i, one in enumerate(samples)
        ]
        batch = policy_batch(trajectories, advantages_B, "token", NEW_TOKENS)
        result = learner.forward_backward(batch, clip(0.2, 0.28)).result()
        norm = learner.optim_step().result().metrics()["grad_norm"]
        learner.publish(engine).result()
        mismatch = float(result.tokens["log_ratio"].abs().max())
        assert mismatch == 0, f"sampler and learner differ by {mismatch} nats"
        seconds.append({"sampling": sampled - began, "learning": clock() - sampled, "grad_norm": norm})
    return seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=3, help="in each process")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--here", action="store_true", help="only in this process, with the environment as it is")
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(steps(arguments.steps)))
        return
    print(json.dumps({**machine(), **versions("torch")}))
    found: dict[str, list[dict[str, float]]] = {kernels: [] for kernels in arguments.kernels}
    command = [sys.executable, str(Path(__file__)), "--here", "--steps", str(arguments.steps)]
    for _ in range(arguments.rounds):
        for kernels, records in found.items():
            environment = {**os.environ, **KERNELS[kernels], "PYTHONWARNINGS": "ignore"}
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            records += json.loads(done.stdout)
    for kernels, records in found.items():
        parts = {part: min(record[part] for record in records) for part in ("sampling", "learning")}
        print(f"{kernels:7}" + "".join(f"  {part} {seconds:6.3f}" for part, seconds in parts.items()))


if __name__ == "__main__":
    main()
