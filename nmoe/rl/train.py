"""GRPO and its kin: sample groups, grade them, push up what beat its group. `nmoe rl train CONFIG`

Shao et al. 2024 (arXiv:2402.03300), R1-Zero style: rewards come from verifiers alone. One loop for every policy gradient that
[algorithm] can name: what is sampled is in policy_rollouts.py, what is learned from it in policy_experience.py
(rewards: policy_rewards.py, advantages: policy_advantages.py), how in policy_update.py, and the critic that makes it PPO in ppo.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from nmoe.config import to_toml
from nmoe.config.arithmetic import batch_arithmetic
from nmoe.config.commands.rl import RLConfig
from nmoe.config.environment import reseeded
from nmoe.engine.native.engine import NativeEngine
from nmoe.envs.environment import Environment
from nmoe.envs.rewards.scored import attach_scorers
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.eval.evaluate import Evaluation, evaluate
from nmoe.recipes.interrupt import Interruptible
from nmoe.recipes.setup import describe, load_tokenizer, model_identity, provenance_of, run_path, set_threads
from nmoe.rl.critic import Critic
from nmoe.rl.metrics import rollout_metrics
from nmoe.rl.models import Models, policy_learner
from nmoe.rl.records import StepRecords
from nmoe.rl.reference import Reference
from nmoe.rl.rollouts import RolloutSampler
from nmoe.rl.standstill import rates_of, read_rates, reason_to_end
from nmoe.rl.update import PolicyUpdate
from nmoe.rollout.collector import Collector
from nmoe.rollout.recorder import ReplayRecorder
from nmoe.runs.checkpoint import mark_best, save_checkpoint
from nmoe.runs.directory import RunDirectory
from nmoe.runs.progress import Progress
from nmoe.text.tokenizer import Tokenizer
from nmoe.verifier.scorers import RewardModel, load_scorer, load_step_scorer


def train(config: RLConfig) -> Path:
    """Runs the configuration to its last step and returns the run directory. Raises KeyboardInterrupt, with a checkpoint
    saved, where a signal asked it to stop."""
    threads = set_threads(config)
    tokenizer = load_tokenizer(config.model)
    environment = Environment.from_settings(reseeded(config.environment, config.run.seed), tokenizer)
    attach_scorers(environment.rewards, load_scorer, load_step_scorer, RewardModel.load)
    probe = None
    if config.eval.every_steps:
        named = config.eval.environment
        split = config.eval.split
        probe = environment.held_out(split) if named is None else Environment.from_settings(named, tokenizer)
    models = Models.build(config, tokenizer)
    for loaded in [environment, probe] if probe is not None else [environment]:
        loaded.leave_out_overlong(models.policy.config.context_tokens, config.sampling.max_new_tokens)
    with ExitStack() as stack:
        runtime = stack.enter_context(ToolRuntime(environment, config.sandbox))
        probe_runtime = runtime
        if probe is not None and config.eval.environment is not None:
            probe_runtime = stack.enter_context(ToolRuntime(probe, config.sandbox))
        run = stack.enter_context(
            RunDirectory.create(run_path(config), to_toml(config), provenance_of(config, threads), config.run.resume)
        )
        recipe = _Loop(config, run, tokenizer, environment, runtime, probe, probe_runtime, models)
        recipe.run_to_the_end()
    return run.path


class _Loop:
    """The state of one run: learner, engine and the position in the environment."""

    def __init__(
        self,
        config: RLConfig,
        run: RunDirectory,
        tokenizer: Tokenizer,
        environment: Environment,
        runtime: ToolRuntime,
        probe: Environment | None,
        probe_runtime: ToolRuntime,
        models: Models,
    ) -> None:
        self.config, self.run, self.tokenizer = config, run, tokenizer
        self.environment, self.probe = environment, probe
        self.runtime, self.probe_runtime = runtime, probe_runtime
        self.probe_start = None if probe is None else probe.state()
        model, lora = models.policy, models.lora
        self.learner = policy_learner(config, models)
        self.engine = NativeEngine(model, config.engine.max_sequences, config.engine.cache_mb)
        identity = model_identity(config, lora).model_dump()
        collector = Collector(
            self.engine,
            environment,
            model.config.context_tokens,
            runtime.sandboxes,
            model=identity,
            workspaces=runtime.workspaces,
        )
        replays = ReplayRecorder(
            run.replays,
            environment,
            tokenizer,
            seed=config.run.seed,
            sample_rate=config.monitor.replay_sample_rate,
            per_failure=config.monitor.replays_per_failure,
            sandbox=runtime.record(),
        )
        self.sampler = RolloutSampler(config, run, tokenizer, environment, collector, replays)
        self.reference = Reference(config, self.learner, models.before) if config.algorithm.kl_coef > 0 else None
        self.critic = None if config.critic is None else Critic(config, self.learner, models.critic)
        token_limit = environment.token_limit(config.sampling.max_new_tokens)
        self.rates = read_rates(run.path / "eval")
        self.update = PolicyUpdate(config, self.learner, self.reference, self.critic, token_limit, models.teacher)
        if run.resumed_from is not None:
            self._load(run.resumed_from)

    def run_to_the_end(self) -> None:
        config, first = self.config, self.run.start_step
        with (
            Interruptible() as interrupt,
            Progress(config.run.steps, self.run.log, config.run.name, first) as progress,
        ):
            for line in [*batch_arithmetic(config), *describe(config, self.learner.lora)]:
                progress.note(line)
            if self.environment.pool.order.read_as:
                progress.note(f"records: {self.environment.pool.order.read_as}")
            if self.runtime.sandboxes is not None:
                progress.note(f"sandbox: {self.runtime.sandboxes.describe()}")
            if self.environment.overlong:
                progress.note(
                    f"{self.environment.overlong} of {self.environment.pool.size} problems are left out: their prompts and "
                    f"completions of {config.sampling.max_new_tokens} tokens do not fit the model's context"
                )
            self.progress = progress
            self.records = StepRecords(self.run, self.tokenizer, progress, self.learner.model.config.routed_experts)
            if first == 0:
                self._evaluate(0)
            else:
                progress.note(f"resumed from step {first}")
                self.learner.publish(self.engine).result()
                # The kill may have come between the checkpoint and its mark.
                if self.run.resumed_from is not None and self.run.ledger.is_best(first):
                    mark_best(self.run.resumed_from)
            if first and (ended := self._ended()) is not None:
                progress.note(f"step {first}: ended here, since {ended}")
                return
            for step in range(first + 1, config.run.steps + 1):
                self._step(step)
                last = step == config.run.steps
                if config.eval.every_steps and (last or step % config.eval.every_steps == 0):
                    self._evaluate(step)
                    if not last and (ended := self._ended()) is not None:
                        progress.note(f"step {step}: ends here, since {ended}")
                        last = True
                best = self.run.ledger.is_best(step)
                # Asked once: a signal that comes during the save is met after the next step.
                stopping = interrupt.requested
                if last or best or stopping or step % config.checkpoint.every_steps == 0:
                    saved = save_checkpoint(self.run.checkpoints, step, self._save, config.checkpoint.keep)
                    if best:
                        mark_best(saved)
                if last:
                    break
                if stopping:
                    progress.note(f"interrupted: saved step {step}; go on with --run.resume=true")
                    raise KeyboardInterrupt

    def _step(self, step: int) -> None:
        """One step: sample, update on what was worth it, publish."""
        began = time.perf_counter()
        # Neither an evaluation nor a step that published nothing may leave a prefix behind: a resumed run would not find it.
        self.engine.forget_prefixes()
        rollouts = self.sampler.sample(step)
        metrics = rollout_metrics(rollouts.trajectories) | rollouts.metrics()
        learn_began = time.perf_counter()
        updated = self.update.update(step, rollouts.kept) if rollouts.kept else {}
        metrics |= updated | {"skipped": float(not updated)}
        sync_began = time.perf_counter()
        # While its critic warms up the policy takes no step, and the engine has its weights already.
        if "learning_rate" in updated:
            self.learner.publish(self.engine).result()
        sync_s = time.perf_counter() - sync_began
        if not updated:
            self.records.alert(step, f"{rollouts.why_nothing()}: no optimizer step was taken")
        if self.reference is not None:
            self.reference.renew(step)
        metrics |= self._advance_curriculum(step, metrics)
        now = time.perf_counter()
        metrics |= {
            "time_rollout_s": rollouts.rollout_s,
            "time_grade_s": rollouts.grade_s,
            "time_learn_s": now - learn_began - sync_s,
            "time_sync_s": sync_s,
            "time_step_s": now - began,
            "tokens_per_second": sum(t.sampled_tokens for t in rollouts.trajectories) / rollouts.rollout_s,
        }
        self.records.step(step, rollouts, metrics)

    def _advance_curriculum(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """The stage and weights that this step was graded by; its rates may open the next one."""
        curriculum = self.environment.curriculum
        if curriculum is None:
            return {}
        in_force = {f"weight/{name}": weight for name, weight in curriculum.weights.items()}
        in_force["curriculum_stage"] = curriculum.index
        before = curriculum.stage
        curriculum.observe({**metrics, **in_force})
        if curriculum.stage != before:
            self.records.note(step, f"curriculum stage {before!r} reached, {curriculum.stage!r} opens")
        return in_force

    def _ended(self) -> str | None:
        """Why the run ends with its latest evaluation; None where it goes on."""
        return reason_to_end(self.rates, self.config.eval.enough, self.config.eval.patience) if self.rates else None

    def _evaluate(self, step: int) -> None:
        """Held-out evaluation; step 0 is the baseline that later ones are compared with."""
        if self.probe is None or self.probe_start is None:
            return
        self.probe.load_state(self.probe_start)  # always the same problems
        self.engine.forget_prefixes()
        results: list[Evaluation] = evaluate(
            self.engine,
            self.probe,
            self.learner.model.config.context_tokens,
            problems=self.config.eval.problems,
            samples=1,
            temperature=self.config.eval.temperature,
            max_new_tokens=self.config.sampling.max_new_tokens,
            seed=self.config.run.seed,
            runtime=self.probe_runtime,
        )
        records = [result.record() for result in results]
        self.run.ledger.evaluation(step, {"results": records})
        self.rates.append(rates_of(records))
        self.progress.note(f"step {step}: held-out {results[0]}")

    def _save(self, directory: Path) -> None:
        self.learner.save(directory)
        for part in (self.reference, self.critic):
            if part is not None:
                part.save(directory)
        self.tokenizer.save(directory)
        state = {"environment": self.environment.state(), "version": self.learner.version}
        if self.sampler.focus is not None:
            state["focus"] = self.sampler.focus.rates
        (directory / "state.json").write_text(json.dumps(state) + "\n")

    def _load(self, directory: Path) -> None:
        self.learner.load(directory)
        for part in (self.reference, self.critic):
            if part is not None:
                part.load(directory)
        state = json.loads((directory / "state.json").read_text())
        self.environment.load_state(state["environment"])
        if self.sampler.focus is not None:
            self.sampler.focus.rates = state["focus"]
        # `publish` counts on from here, so that the engine gets the very number it had.
        self.learner.version = state["version"] - 1
