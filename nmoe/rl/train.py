"""GRPO and related policy-gradient methods. Each step samples a group of completions per prompt, grades them, and raises the
probability of those above the group's mean. `nmoe rl train CONFIG`

Shao et al. 2024 (arXiv:2402.03300), algorithm 1, in the style of R1-Zero: all rewards come from verifiers. `PolicyGradient.step` is
one step. The variants that [algorithm] names differ in their advantage and in their loss; a [critic] makes it PPO (critic.py), and
[distillation] adds a teacher (teacher.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from nmoe.config.arithmetic import batch_arithmetic
from nmoe.config.commands.rl import RLConfig
from nmoe.config.environment import reseeded
from nmoe.engine.native.engine import NativeEngine
from nmoe.envs.environment import Environment
from nmoe.envs.rewards.scored import attach_scorers
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.eval.evaluate import evaluate
from nmoe.learner.learner import Learner
from nmoe.recipes.run_loop import HeldOut, Recipe, Run, State, Step, open_run
from nmoe.recipes.setup import (
    add_adapter,
    build_model,
    describe,
    load_tokenizer,
    model_identity,
    optimizer_settings,
    set_threads,
)
from nmoe.rl.critic import Critic, value_head
from nmoe.rl.early_stopping import rates_of, read_rates, reason_to_end
from nmoe.rl.metrics import SPIKE_GRAD_NORM, rollout_metrics, shown
from nmoe.rl.reference import Reference
from nmoe.rl.rewards import differs
from nmoe.rl.rollouts import FailureRecords, Rollouts, RolloutSampler
from nmoe.rl.teacher import Teacher
from nmoe.rl.update import PolicyUpdate
from nmoe.rollout.collector import Collector
from nmoe.rollout.recorder import ReplayRecorder
from nmoe.text.tokenizer import Tokenizer
from nmoe.types import Group
from nmoe.verifier.scorers import RewardModel, load_scorer, load_step_scorer


def train(config: RLConfig) -> Path:
    """Runs the configuration to its last step and returns the run directory. Raises KeyboardInterrupt, with a checkpoint
    saved, where a signal asked it to stop."""
    threads = set_threads(config)
    tokenizer = load_tokenizer(config.model)
    environment = Environment.from_settings(reseeded(config.environment, config.run.seed), tokenizer)
    attach_scorers(environment.rewards, load_scorer, load_step_scorer, RewardModel.load)
    held_out = None
    if config.eval.every_steps:
        named, split = config.eval.environment, config.eval.split
        held_out = environment.held_out(split) if named is None else Environment.from_settings(named, tokenizer)
    learner = policy_learner(config, tokenizer)
    update = PolicyUpdate(
        config,
        learner,
        Reference.build(config, learner, tokenizer),
        Critic.build(config, learner, tokenizer),
        environment.token_limit(config.sampling.max_new_tokens),
        Teacher.build(config, learner.model.config, tokenizer),
    )
    for loaded in [environment, held_out] if held_out is not None else [environment]:
        loaded.leave_out_overlong(learner.model.config.context_tokens, config.sampling.max_new_tokens)
    with ExitStack() as stack:
        tools = held_out_tools = stack.enter_context(ToolRuntime(environment, config.sandbox))
        if held_out is not None and config.eval.environment is not None:
            held_out_tools = stack.enter_context(ToolRuntime(held_out, config.sandbox))
        run = stack.enter_context(open_run(config, threads, around=tools.provenance()))
        run.follow(PolicyGradient(config, run, tokenizer, environment, tools, held_out, held_out_tools, update))
    return run.directory.path


def policy_learner(config: RLConfig, tokenizer: Tokenizer) -> Learner:
    """The policy: a model, the adapter where that alone is trained, and the value head where the critic shares the trunk. The
    learning-rate schedule begins when the critic is warm."""
    model = build_model(config.model, tokenizer, config.run.seed, balance=False)
    lora = add_adapter(config, model)
    critic, updates = config.critic, config.batch.updates
    settings, head, steps = optimizer_settings(config, updates), None, config.run.steps
    if critic is not None:
        steps -= critic.warmup_steps
        if critic.shared:
            settings = replace(settings, head_learning_rate=critic.learning_rate)
            head = value_head(model.config.hidden_size, config.model.path)
    microbatch, temperature = config.batch.tokens_per_microbatch, config.sampling.temperature
    return Learner(model, settings, steps * updates, microbatch, temperature, lora, head=head)


class PolicyGradient(Recipe):
    """The algorithm, and its state: policy, engine, and the position in the environment."""

    def __init__(
        self,
        config: RLConfig,
        run: Run,
        tokenizer: Tokenizer,
        environment: Environment,
        tools: ToolRuntime,
        held_out: Environment | None,
        held_out_tools: ToolRuntime,
        update: PolicyUpdate,
    ) -> None:
        self.config, self.run, self.tokenizer = config, run, tokenizer
        self.environment, self.tools = environment, tools
        self.held_out, self.held_out_tools = held_out, held_out_tools
        self.held_out_start = None if held_out is None else held_out.state()
        self.update, self.learner = update, update.learner
        model = self.learner.model
        self.engine = NativeEngine(model, config.engine.max_sequences, config.engine.cache_mb)
        collector = Collector(
            self.engine,
            environment,
            model.config.context_tokens,
            tools.sandboxes,
            model=model_identity(config, self.learner.lora).model_dump(),
            workspaces=tools.workspaces,
        )
        replays = ReplayRecorder(
            run.directory.replays,
            environment,
            tokenizer,
            seed=config.run.seed,
            sample_rate=config.monitor.replay_sample_rate,
            per_failure=config.monitor.replays_per_failure,
            sandbox=tools.record(),
        )
        failures = FailureRecords(run.directory, tokenizer, replays)
        self.sampler = RolloutSampler(
            collector, environment, config.run, config.batch, config.sampling, self._carries_signal, failures
        )
        self.rates = read_rates(run.directory.path / "eval")
        self.evaluate_every, self.evaluate_first = config.eval.every_steps, held_out is not None
        self.experts = model.config.routed_experts

    def step(self, step: int) -> Step:
        """Samples and grades a group of completions per prompt, updates the policy by their advantages, and publishes the
        weights."""
        began = time.perf_counter()
        # A cached prefix of an evaluation, or of a step that published nothing, would be missing in a resumed run.
        self.engine.forget_prefixes()
        rollouts = self.sampler.sample(step)
        metrics = rollout_metrics(rollouts.trajectories) | rollouts.metrics()
        learn_began = time.perf_counter()
        updated = self.update.update(step, rollouts.kept) if rollouts.kept else {}
        metrics |= updated | {"skipped": float(not updated)}
        publish_began = time.perf_counter()
        # While a critic warms up the policy takes no step, and the engine has its weights already.
        if "learning_rate" in updated:
            self.learner.publish(self.engine).result()
        publish_s = time.perf_counter() - publish_began
        if not updated:
            self.run.alert(step, f"{rollouts.why_nothing()}: no optimizer step was taken")
        if self.update.reference is not None:
            self.update.reference.renew(step)
        metrics |= self._advance_curriculum(step, metrics)
        now = time.perf_counter()
        metrics |= {
            "time_rollout_s": rollouts.rollout_s,
            "time_grade_s": rollouts.grade_s,
            "time_learn_s": now - learn_began - publish_s,
            "time_sync_s": publish_s,
            "time_step_s": now - began,
            "tokens_per_second": sum(t.sampled_tokens for t in rollouts.trajectories) / rollouts.rollout_s,
        }
        self._record(step, rollouts, metrics)
        return Step(metrics, shown(metrics))

    def evaluate(self) -> HeldOut | None:
        """The share of held-out problems solved, the same problems each time."""
        if self.held_out is None or self.held_out_start is None:
            return None
        self.held_out.load_state(self.held_out_start)
        self.engine.forget_prefixes()
        results = evaluate(
            self.engine,
            self.held_out,
            self.learner.model.config.context_tokens,
            problems=self.config.eval.problems,
            samples=1,
            temperature=self.config.eval.temperature,
            max_new_tokens=self.config.sampling.max_new_tokens,
            seed=self.config.run.seed,
            runtime=self.held_out_tools,
        )
        records = [result.record() for result in results]
        self.rates.append(rates_of(records))
        return HeldOut({}, f"held-out {results[0]}", records)

    def save(self, directory: Path) -> State:
        for part in (self.learner, self.update.reference, self.update.critic, self.tokenizer):
            if part is not None:
                part.save(directory)
        state = {"environment": self.environment.state(), "version": self.learner.version}
        return state if self.sampler.focus is None else state | {"focus": self.sampler.focus.rates}

    def load(self, directory: Path, state: State) -> None:
        for part in (self.learner, self.update.reference, self.update.critic):
            if part is not None:
                part.load(directory)
        self.environment.load_state(state["environment"])
        if self.sampler.focus is not None:
            self.sampler.focus.rates = state["focus"]
        # `publish` counts on from here, so that the engine gets the same version as before.
        self.learner.version = state["version"] - 1
        self.learner.publish(self.engine).result()

    def reason_to_end(self) -> str | None:
        return reason_to_end(self.rates, self.config.eval.enough, self.config.eval.patience) if self.rates else None

    def notes(self) -> list[str]:
        environment = self.environment
        lines = [*batch_arithmetic(self.config), *describe(self.config, self.learner.lora)]
        if environment.pool.order.read_as:
            lines.append(f"records: {environment.pool.order.read_as}")
        if self.tools.sandboxes is not None:
            lines.append(f"sandbox: {self.tools.sandboxes.describe()}")
        if environment.overlong:
            lines.append(
                f"{environment.overlong} of {environment.pool.size} problems are left out: their prompts and completions of "
                f"{self.config.sampling.max_new_tokens} tokens do not fit the model's context"
            )
        return lines

    def _carries_signal(self, group: Group) -> bool:
        """Whether the advantages of a group can differ from 0. With a teacher, every group carries signal, even if all rewards
        are equal."""
        algorithm = self.config.algorithm
        if not algorithm.in_groups or self.config.distillation is not None:
            return True
        return differs(group, algorithm, self.update.token_limit)

    def _advance_curriculum(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """The stage and the weights that this step was graded by; its rates may open the next stage."""
        curriculum = self.environment.curriculum
        if curriculum is None:
            return {}
        in_force = {f"weight/{name}": weight for name, weight in curriculum.weights.items()}
        in_force["curriculum_stage"] = curriculum.index
        before = curriculum.stage
        curriculum.observe({**metrics, **in_force})
        if curriculum.stage != before:
            self.run.note(f"step {step}: curriculum stage {before!r} reached, {curriculum.stage!r} opens")
        return in_force

    def _record(self, step: int, rollouts: Rollouts, metrics: Mapping[str, float]) -> None:
        """Writes the step's first group as samples, and a spike of the gradient with the problems of its batch."""
        group = rollouts.groups[0].trajectories
        self.run.ledger.samples(step, (t.record(step, self.tokenizer.decode(t.token_ids)) for t in group))
        if metrics.get("grad_norm", 0.0) > SPIKE_GRAD_NORM:
            ratios = {name: metrics[name] for name in ("grad_norm", "log_ratio_raw_max", "log_ratio_min", "ratio_max")}
            problems = [group.problem.id for group in rollouts.kept]
            self.run.ledger.spike({"step": step, **ratios, "problems": problems})
