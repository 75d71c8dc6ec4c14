"""Starts `nmoe rl train CONFIG`: builds the parts of the training loop in `nmoe/rl/train.py`, and runs it to its last step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nmoe.config.commands import RLConfig
from nmoe.config.environment import reseeded
from nmoe.engine.api import Engine
from nmoe.engine.function import FunctionEngine, GenerateFunction
from nmoe.envs.environment import Environment
from nmoe.envs.rewards.scored import attach_scorers
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.eval.probes import Probes, probes_of
from nmoe.parallel.gang import everywhere
from nmoe.recipes.run_loop import open_run
from nmoe.recipes.setup import load_tokenizer, settle, with_offers
from nmoe.rl.advantages import Advantages
from nmoe.rl.critic import Critic
from nmoe.rl.engines import rollout_engine
from nmoe.rl.episodes import with_steps_of_episodes
from nmoe.rl.policy import policy_learner
from nmoe.rl.reference import Reference
from nmoe.rl.rollouts import RolloutSampler
from nmoe.rl.teacher import Teacher
from nmoe.rl.train import PolicyGradient
from nmoe.rl.update import PolicyUpdate
from nmoe.verifier.scorers import RewardModel, load_scorer, load_step_scorer


def _sampler(*parts: Any) -> RolloutSampler:
    config, engine = parts[0], parts[-1]
    if not config.asynchrony.max_staleness:
        return RolloutSampler(*parts[:-1])
    from nmoe.engine.remote.published import PublishedFleet
    from nmoe.rl.asynchronous import AsyncRollouts

    assert isinstance(engine, PublishedFleet), "the configuration requires servers"
    return AsyncRollouts(*parts)


@dataclass(frozen=True)
class Parts:
    """The parts of a run that a replay makes in its own way, and its last step, if it is not the configuration's.

    `sampler` gets what `RolloutSampler` does, and the engine whose weights are published; `recipe` what `PolicyGradient` does."""

    engine: Callable[..., AbstractContextManager[Engine]] = rollout_engine
    sampler: Callable[..., RolloutSampler] = _sampler
    recipe: Callable[..., PolicyGradient] = PolicyGradient
    steps: int | None = None


def train(config: RLConfig, generate_fn: GenerateFunction | None = None, parts: Parts | None = None) -> Path:
    """Trains as the configuration says, to the last step, and returns the run directory. `generate_fn` generates the samples in
    place of the built-in engine. Raises KeyboardInterrupt, after saving a checkpoint, where a signal asked it to stop."""
    parts = parts or Parts()
    config, threads = settle(config)
    tokenizer = load_tokenizer(config.model)
    environment = Environment.from_settings(reseeded(config.environment, config.run.seed), tokenizer)
    config = with_offers(corrected(with_steps_of_episodes(config, environment.pool.size)), environment)
    device = config.model.device
    attach_scorers(
        environment.rewards,
        partial(load_scorer, device=device),
        partial(load_step_scorer, device=device),
        partial(RewardModel.load, device=device),
    )
    probes = probes_of(config.eval, tokenizer, environment, config.sampling.max_new_tokens)
    learner = everywhere(policy_learner, config, tokenizer)
    policy = PolicyUpdate(
        learner,
        config.algorithm,
        config.sampling,
        sizes=config.batch,
        seed=config.run.seed,
        reference=everywhere(Reference.build, config, learner, tokenizer),
        critic=Critic.build(config, learner, tokenizer),
        older=config.asynchrony.max_staleness > 0,
        taught=config.distillation is not None,
    )
    context_tokens = learner.model.config.context_tokens
    environment.leave_out_overlong(context_tokens, config.sampling.max_new_tokens)
    with ExitStack() as stack:
        teacher = Teacher.build(config, learner.model.config, tokenizer, stack)
        advantages = Advantages(config.algorithm, config.sampling.max_new_tokens, config.critic, teacher)
        tools = stack.enter_context(ToolRuntime(environment, config.sandbox))
        asked = Probes(
            probes,
            tokenizer,
            context_tokens,
            config.sandbox,
            stack,
            steps=config.run.steps,
            seed=config.run.seed,
            tools=tools,
        )
        run = stack.enter_context(open_run(config, threads, parts.steps, around=tools.provenance()))
        engine = stack.enter_context(
            parts.engine(config.engine, learner, run.directory.path, run.note, config.asynchrony)
        )
        samples_with: Engine = engine
        if generate_fn is not None:
            version = None if config.asynchrony.max_staleness else lambda: learner.version
            samples_with = FunctionEngine(engine, generate_fn, version, learner.model.config)
        sampler = parts.sampler(config, run.directory, tokenizer, environment, tools, samples_with, learner, engine)
        stack.enter_context(sampler.open())
        run.follow(parts.recipe(config, run, tokenizer, environment, tools, asked, engine, sampler, advantages, policy))
    return run.directory.path


def corrected(config: RLConfig) -> RLConfig:
    """Returns the configuration with a correction for older samples, if they are allowed and algorithm.correction is not given."""
    algorithm = config.algorithm
    if not config.asynchrony.max_staleness or algorithm.loss == "dppo" or "correction" in algorithm.model_fields_set:
        return config
    return config.model_copy(update={"algorithm": algorithm.model_copy(update={"correction": "tis"})})
