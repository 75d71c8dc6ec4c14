"""GRPO: sample groups, grade them, push up what beat its group. `nmoe rl train CONFIG`

Shao et al. 2024 (arXiv:2402.03300), R1-Zero style: rewards come from verifiers alone. One optimizer step per batch of fresh
samples; groups whose rewards are all alike carry no signal and are replaced, a bounded number of times (dynamic
sampling, arXiv:2503.14476, section 3.2).
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from nmoe.config import to_toml
from nmoe.config.arithmetic import batch_arithmetic
from nmoe.config.environment import reseeded
from nmoe.config.run import RLConfig
from nmoe.engine.native.engine import NativeEngine
from nmoe.errors import InfrastructureError
from nmoe.eval.evaluate import Evaluation, evaluate
from nmoe.learner.advantages import ADVANTAGES
from nmoe.learner.batch import Batch
from nmoe.learner.forward import batch_logprobs
from nmoe.learner.learner import Learner
from nmoe.learner.objectives import policy_gradient
from nmoe.model.lora import Lora
from nmoe.model.transformer import Transformer
from nmoe.recipes.interrupt import Interruptible
from nmoe.recipes.policy_batch import policy_batch
from nmoe.recipes.policy_metrics import rollout_metrics, update_metrics
from nmoe.recipes.setup import (
    add_adapter,
    build_model,
    describe,
    load_tokenizer,
    model_identity,
    optimizer_settings,
    run_path,
    set_threads,
)
from nmoe.rl.environment import Environment
from nmoe.rl.failures import Failure
from nmoe.rl.rollout.collector import Collector, GradingError, RolloutSettings
from nmoe.rl.rollout.recorder import ReplayRecorder
from nmoe.rl.rollout.trajectory import Group, Trajectory
from nmoe.rl.tools.runtime import ToolRuntime
from nmoe.runs.checkpoint import mark_best, save_checkpoint
from nmoe.runs.directory import RunDirectory
from nmoe.runs.progress import Progress
from nmoe.runs.provenance import provenance
from nmoe.runs.watch import ExpertWatch
from nmoe.text.tokenizer import Tokenizer

# Before clipping; what lies above is kept with its problems in spikes.jsonl.
SPIKE_GRAD_NORM = 50.0


@dataclass
class Rollouts:
    """What one step sampled: every group, those worth training on, and how long it took."""

    groups: list[Group] = field(default_factory=list)
    kept: list[Group] = field(default_factory=list)
    rollout_s: float = 0.0
    grade_s: float = 0.0
    refills: int = 0

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]


def train(config: RLConfig) -> Path:
    """Runs the configuration to its last step and returns the run directory. Raises KeyboardInterrupt, with a checkpoint
    saved, where a signal asked it to stop."""
    threads = set_threads(config)
    tokenizer = load_tokenizer(config.model)
    environment = Environment.from_settings(reseeded(config.environment, config.run.seed), tokenizer)
    probe = None
    if config.eval.every_steps:
        named = config.eval.environment
        probe = environment.held_out() if named is None else Environment.from_settings(named, tokenizer)
    model = build_model(config.model, tokenizer, config.run.seed)
    lora = add_adapter(config, model)
    reference = None
    if config.algorithm.kl_coef > 0 and lora is None:
        # The policy before training, whether or not this is a resumption. With an adapter it is the base, which is there already.
        reference = build_model(config.model, tokenizer, config.run.seed).requires_grad_(False)
    for loaded in [environment, probe] if probe is not None else [environment]:
        loaded.leave_out_overlong(model.config.context_tokens, config.sampling.max_new_tokens)
    with ExitStack() as stack:
        runtime = stack.enter_context(ToolRuntime(environment, config.sandbox))
        probe_runtime = runtime
        if probe is not None and config.eval.environment is not None:
            probe_runtime = stack.enter_context(ToolRuntime(probe, config.sandbox))
        run = stack.enter_context(
            RunDirectory.create(
                run_path(config), to_toml(config), provenance(config.run.seed, threads), config.run.resume
            )
        )
        recipe = _Grpo(config, run, tokenizer, environment, runtime, probe, probe_runtime, model, reference, lora)
        recipe.run_to_the_end()
    return run.path


class _Grpo:
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
        model: Transformer,
        reference: Transformer | None,
        lora: Lora | None,
    ) -> None:
        self.config, self.run, self.tokenizer = config, run, tokenizer
        self.environment, self.probe, self.reference = environment, probe, reference
        self.runtime, self.probe_runtime = runtime, probe_runtime
        self.probe_start = None if probe is None else probe.state()
        self.learner = Learner(
            model,
            optimizer_settings(config),
            config.run.steps,
            config.batch.tokens_per_microbatch,
            config.sampling.temperature,
            lora,
        )
        self.engine = NativeEngine(model, config.engine.max_sequences, config.engine.cache_mb)
        identity = model_identity(config, lora).model_dump()
        self.collector = Collector(
            self.engine,
            environment,
            model.config.context_tokens,
            runtime.sandboxes,
            model=identity,
            workspaces=runtime.workspaces,
        )
        self.replays = ReplayRecorder(
            run.replays,
            environment,
            tokenizer,
            seed=config.run.seed,
            sample_rate=config.monitor.replay_sample_rate,
            per_failure=config.monitor.replays_per_failure,
            sandbox=runtime.record(),
        )
        self.expert_watch = ExpertWatch(model.config.experts)
        algorithm = config.algorithm
        self.objective = policy_gradient(
            algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip, algorithm.kl_coef, algorithm.kl_estimator
        )
        if run.resumed_from is not None:
            self._load(run.resumed_from)

    def run_to_the_end(self) -> None:
        config, first = self.config, self.run.start_step
        with (
            Interruptible() as interrupt,
            Progress(config.run.steps, self.run.log, config.run.name, first) as progress,
        ):
            for line in [*batch_arithmetic(config), *describe(self.learner.lora)]:
                progress.note(line)
            if self.runtime.sandboxes is not None:
                progress.note(f"sandbox: {self.runtime.sandboxes.describe()}")
            if self.environment.overlong:
                progress.note(
                    f"{self.environment.overlong} of {self.environment.pool.size} problems are left out: their prompts and "
                    f"completions of {config.sampling.max_new_tokens} tokens do not fit the model's context"
                )
            self.progress = progress
            if first == 0:
                self._evaluate(0)
            else:
                progress.note(f"resumed from step {first}")
                self.learner.publish(self.engine).result()
                # The kill may have come between the checkpoint and its mark.
                if self.run.resumed_from is not None and self.run.ledger.is_best(first):
                    mark_best(self.run.resumed_from)
            for step in range(first + 1, config.run.steps + 1):
                self._step(step)
                last = step == config.run.steps
                if config.eval.every_steps and (last or step % config.eval.every_steps == 0):
                    self._evaluate(step)
                if last or interrupt.requested or step % config.checkpoint.every_steps == 0:
                    saved = save_checkpoint(self.run.checkpoints, step, self._save, config.checkpoint.keep)
                    if self.run.ledger.is_best(step):
                        mark_best(saved)
                if interrupt.requested and not last:
                    progress.note(f"interrupted: saved step {step}; go on with --run.resume=true")
                    raise KeyboardInterrupt

    def _step(self, step: int) -> None:
        """One step of GRPO: sample, estimate advantages, update, publish."""
        config, began = self.config, time.perf_counter()
        passed_over = self.environment.pool.passed_over
        rollouts = self._sample(step)
        self._record_failures(step, rollouts.trajectories)
        metrics = rollout_metrics(rollouts.trajectories)
        metrics |= {
            "groups": len(rollouts.groups),
            "groups_zero_variance": len(rollouts.groups) - len(rollouts.kept),
            "refills": rollouts.refills,
            "problems_left_out": self.environment.pool.passed_over - passed_over,
        }
        learn_began = time.perf_counter()
        sync_s = 0.0
        if rollouts.kept:
            trajectories = [trajectory for group in rollouts.kept for trajectory in group.trainable]
            rewards_B = torch.tensor([t.grade.score for t in trajectories])
            group_ids_B = torch.tensor([place for place, group in enumerate(rollouts.kept) for _ in group.trainable])
            advantages_B = ADVANTAGES[config.algorithm.advantage](rewards_B, group_ids_B)
            batch = policy_batch(
                trajectories, advantages_B, config.algorithm.aggregation, config.sampling.max_new_tokens
            )
            if config.algorithm.kl_coef > 0:
                batch = batch.with_reference(self._reference_logprobs(batch))
            result = self.learner.forward_backward(batch, self.objective).result()
            update = self.learner.optim_step().result()
            sync_began = time.perf_counter()
            self.learner.publish(self.engine).result()
            sync_s = time.perf_counter() - sync_began
            metrics |= update_metrics(result, update, advantages_B)
        else:
            message = f"every one of {len(rollouts.groups)} groups had rewards all alike: no optimizer step was taken"
            self.run.ledger.alert({"step": step, "message": message})
            self.progress.note(f"step {step}: {message}")
        metrics["skipped"] = float(not rollouts.kept)
        if self.environment.curriculum is not None:
            curriculum = self.environment.curriculum
            metrics["curriculum_stage"] = curriculum.index
            metrics |= {f"weight/{name}": weight for name, weight in curriculum.weights.items()}
            before = curriculum.stage
            curriculum.observe(metrics)
            if curriculum.stage != before:
                self.progress.note(f"step {step}: curriculum stage {before!r} reached, {curriculum.stage!r} opens")
        now = time.perf_counter()
        metrics |= {
            "time_rollout_s": rollouts.rollout_s,
            "time_grade_s": rollouts.grade_s,
            "time_learn_s": now - learn_began - sync_s,
            "time_sync_s": sync_s,
            "time_step_s": now - began,
            "tokens_per_second": sum(t.sampled_tokens for t in rollouts.trajectories) / rollouts.rollout_s,
        }
        self._record(step, rollouts, metrics)

    def _reference_logprobs(self, batch: Batch) -> Tensor:
        """Those of the policy before training or, where an adapter is trained, of the base without it."""
        config, lora = self.config, self.learner.lora
        with lora.disabled() if lora is not None else nullcontext(self.reference) as reference:
            assert reference is not None, "a run with a divergence has a reference"
            return batch_logprobs(
                reference,
                batch.without_routes(),
                config.batch.tokens_per_microbatch,
                config.sampling.temperature,
            )

    def _sample(self, step: int) -> Rollouts:
        """Groups for one step. Those without variance are replaced by fresh prompts, at most `max_refills` times."""
        config, rollouts = self.config, Rollouts()
        settings = RolloutSettings(
            samples=config.batch.group_size,
            max_new_tokens=config.sampling.max_new_tokens,
            temperature=config.sampling.temperature,
            top_p=config.sampling.top_p,
            top_k=config.sampling.top_k,
        )
        for refill in range(config.batch.max_refills + 1):
            missing = config.batch.prompts_per_step - len(rollouts.kept)
            if missing == 0:
                break
            problems = self.environment.pool.take(missing)
            try:
                collected = self.collector.collect(problems, settings, (config.run.seed, "train", step, refill))
            except GradingError as error:
                record = error.trajectory.record(step, self.tokenizer.decode(error.trajectory.token_ids))
                self.run.ledger.failure(record)
                self.replays.write(step, [error.trajectory])
                raise
            rollouts.groups += collected.groups
            rollouts.kept += [group for group in collected.groups if group.informative]
            rollouts.rollout_s += collected.rollout_s
            rollouts.grade_s += collected.grade_s
            rollouts.refills = refill
        return rollouts

    def _record_failures(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """What the infrastructure lost, the first trajectory with each failure of its own or of a call, and the step's replay
        bundles. Raises InfrastructureError where everything was lost."""
        lost = [trajectory for trajectory in trajectories if not trajectory.trainable]
        seen: set[Failure] = {"ok"}
        for trajectory in trajectories:
            failures = {trajectory.grade.failure, *(event.failure for event in trajectory.tool_events)}
            if not trajectory.trainable or not failures <= seen:
                self.run.ledger.failure(trajectory.record(step, self.tokenizer.decode(trajectory.token_ids)))
            seen |= failures
        self.replays.write(step, trajectories)
        if len(lost) == len(trajectories):
            counts = Counter(trajectory.grade.failure for trajectory in lost)
            raise InfrastructureError(
                f"step {step}: every sample was lost to the infrastructure, none to the policy: "
                + ", ".join(f"{count} {name}" for name, count in counts.most_common())
                + f"; the reasons are in {self.run.path / 'failures.jsonl'}"
            )

    def _record(self, step: int, rollouts: Rollouts, metrics: dict[str, float]) -> None:
        """One line of metrics and the step's first group as samples."""
        ledger = self.run.ledger
        ledger.metrics(step, metrics)
        if (message := self.expert_watch.observe(metrics)) is not None:
            ledger.alert({"step": step, "message": message})
            self.progress.note(f"step {step}: {message}")
        shown = rollouts.groups[0].trajectories
        ledger.samples(step, (t.record(step, self.tokenizer.decode(t.token_ids)) for t in shown))
        if metrics.get("grad_norm", 0.0) > SPIKE_GRAD_NORM:
            ratios = {name: metrics[name] for name in ("grad_norm", "log_ratio_raw_max", "log_ratio_min", "ratio_max")}
            ledger.spike({"step": step, **ratios, "problems": [group.problem.id for group in rollouts.kept]})
        numbers = {
            "reward": metrics["reward_mean"],
            "correctness": metrics["correctness"],
            "format": metrics["format_ok"],
            "length": metrics["response_length_mean"],
            "tokens/s": metrics["tokens_per_second"],
        }
        if rollouts.kept:
            numbers["mismatch"] = metrics["mismatch_abs_mean"]
        self.progress.step(step, numbers)

    def _evaluate(self, step: int) -> None:
        """Greedy held-out evaluation; step 0 is the baseline that later ones are compared with."""
        if self.probe is None or self.probe_start is None:
            return
        self.probe.load_state(self.probe_start)  # always the same problems
        results: list[Evaluation] = evaluate(
            self.engine,
            self.probe,
            self.learner.model.config.context_tokens,
            problems=self.config.eval.problems,
            samples=1,
            temperature=0.0,
            max_new_tokens=self.config.sampling.max_new_tokens,
            seed=self.config.run.seed,
            runtime=self.probe_runtime,
        )
        self.run.ledger.evaluation(step, {"results": [result.record() for result in results]})
        self.progress.note(f"step {step}: held-out {results[0]}")

    def _save(self, directory: Path) -> None:
        self.learner.save(directory)
        self.tokenizer.save(directory)
        state = {"environment": self.environment.state(), "version": self.learner.version}
        (directory / "state.json").write_text(json.dumps(state) + "\n")

    def _load(self, directory: Path) -> None:
        self.learner.load(directory)
        state = json.loads((directory / "state.json").read_text())
        self.environment.load_state(state["environment"])
        # `publish` counts on from here, so that the engine gets the very number it had.
        self.learner.version = state["version"] - 1
