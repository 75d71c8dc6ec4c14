"""GRPO and related policy-gradient methods, the loop of `nmoe rl train CONFIG`. Each step samples a group of completions per
prompt, grades them, and raises the probability of those above the group's mean.

Shao et al. 2024 (arXiv:2402.03300), algorithm 1, in the style of R1-Zero: all rewards come from verifiers. `PolicyGradient.step` is
one step. The variants that [algorithm] names differ in their advantage and in their loss; a [critic] makes it PPO (critic.py), and
[distillation] adds a teacher (teacher.py).
"""

# Shapes: B samples, S sequences (the branches of samples), T predicting positions, R rewards of a sample.

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nmoe.config.arithmetic import asynchrony_notes, batch_arithmetic
from nmoe.config.commands import RLConfig, RunConfig
from nmoe.engine.api import Engine
from nmoe.envs.environment import Environment
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.eval.probes import Probes
from nmoe.generation import sampling_notes
from nmoe.learner.learner import Learner
from nmoe.model.device import return_gaps
from nmoe.monitor.update import spikes_in
from nmoe.recipes.run_loop import HeldOut, Recipe, Run, Step
from nmoe.recipes.setup import describe
from nmoe.rl.advantages import Advantages
from nmoe.rl.experience import Experience
from nmoe.rl.metrics import rollout_metrics, routing_by_source, routing_metrics, shown
from nmoe.rl.rollouts import Rollouts, RolloutSampler
from nmoe.rl.spikes import spike_record
from nmoe.rl.update import PolicyUpdate
from nmoe.runs.ledger import read_metrics
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.runs.state import Files, Part, Subdirectory
from nmoe.text.tokenizer import Tokenizer


class PolicyGradient(Recipe):
    """The policy-gradient training loop with its state: policy, engine, and the position in the environment's problems."""

    def __init__(
        self,
        config: RLConfig,
        run: Run,
        tokenizer: Tokenizer,
        environment: Environment,
        tools: ToolRuntime,
        probes: Probes,
        engine: Engine,
        sampler: RolloutSampler,
        advantages: Advantages,
        policy: PolicyUpdate,
    ) -> None:
        self.config, self.run, self.tokenizer = config, run, tokenizer
        self.environment, self.tools, self.probes = environment, tools, probes
        self.engine, self.sampler, self.advantages = engine, sampler, advantages
        self.policy, self.learner = policy, policy.learner
        self.evaluate_every, self.evaluate_first = probes.every_steps, bool(probes)
        self._at = 0  # the step that was taken last
        self._recorder = None
        if config.monitor.samples == "all":
            from nmoe.rl.recording import SampleRecorder

            experts = self.learner.model.config.routed_experts
            self._recorder = SampleRecorder(config, run.directory.path, tokenizer, experts)
        self._skipped = False  # whether the last step was skipped: only the first of several in a row raises an alert

    def watched(self) -> Learner:
        return self.learner

    def monitored(self, config: RunConfig) -> RunConfig:
        # Of several system messages the one of the tokenizer's format says whether an answer belongs in a box.
        return config.model_copy(update={"environment": self.environment.settings})

    def step(self, step: int) -> Step:
        """Samples and grades a group of completions per prompt, turns their rewards into advantages, updates the policy, and sends
        its weights to the engine; returns the step's metrics. The policy stays as it is if no group is left to train on, and while
        only the critic is trained."""
        began, self._at, age = time.perf_counter(), step, self.learner.ahead
        rollouts = self.sampler.sample(step)
        learn_began = time.perf_counter()
        updated: dict[str, float] = {}
        tokens: dict[str, Tensor] = {}
        experience = None
        if rollouts.kept:
            self.engine.sleep()
            return_gaps()
            batch = self.policy.batch(rollouts.kept_samples)
            # By default `DrGrpo` of nmoe/rl/advantages.py: reward - mean of the group.
            experience = self.advantages(batch, rollouts.kept)
            updated = self.policy.update(step, experience, None if self._recorder is None else tokens)
        account = self.sampler.settle(rollouts, experience)
        if age:  # what remains compares two computations by the same weights
            updated = {name: value for name, value in updated.items() if not name.startswith(("mismatch_", "route_"))}
        publish_began = time.perf_counter()
        if self._publishes_after(step):
            self._publish()
        times = {"time_learn_s": publish_began - learn_began, "time_sync_s": time.perf_counter() - publish_began}
        if self.policy.reference is not None:
            self.policy.reference.renew(step)
        metrics = {**rollout_metrics(rollouts.trajectories), **rollouts.metrics(), **account, **updated}
        shares = routing_by_source(rollouts.trajectories, self.learner.model.config.routed_experts)
        metrics |= routing_metrics(shares)
        metrics["skipped"] = float(not updated)
        if self.config.engine.publish_every > 1:
            metrics["engine_age"] = float(age)
        metrics |= self._advance_curriculum(step, metrics)
        self.sampler.go_on(step)
        record_began = time.perf_counter()
        self._record_samples(step, rollouts, experience, tokens)
        times["time_record_s"] = time.perf_counter() - record_began
        metrics |= {**rollouts.times(), **times, **self.engine.metrics(), "time_step_s": time.perf_counter() - began}
        self._record(step, rollouts, metrics)
        self._record_routing(step, shares)
        return Step(metrics, shown(metrics))

    def _publishes_after(self, step: int) -> bool:
        """Returns whether the engine gets the weights after a step. A step that is saved is among these: a resumed run begins with
        a publication, and has to sample what the uninterrupted one does."""
        every = self.config.engine.publish_every, self.config.checkpoint.every_steps
        return step == self.config.run.steps or any(step % one == 0 for one in every)

    def _publish(self) -> None:
        # While a critic warms up the policy takes no step, and the engine has its weights already.
        if self.learner.ahead:
            self.learner.publish(self.engine).result()

    def may_stop(self) -> bool:
        return not self.learner.ahead

    def evaluate(self) -> HeldOut | None:
        """Evaluates the policy on the held-out problems, the same ones each time; None if there are no such problems, or no
        evaluation is due. Raises GradingError after saving its sample."""
        if not self.probes:
            return None
        self._publish()
        records = self.probes.evaluate(self._at, self.engine, self.run.directory)
        if not records:
            return None
        return HeldOut({}, "; ".join(self.probes.notes(records)), records)

    def parts(self) -> dict[str, Part]:
        reference, critic = self.policy.reference, self.policy.critic
        parts: dict[str, Part] = {
            "learner": self.learner,
            "tokenizer": Files(self.tokenizer.save),
            **self.sampler.parts(),
        }
        if reference is not None and reference.renewed:
            parts["reference"] = Subdirectory("reference", {"model": reference})
        if critic is not None and critic.own is not None:
            parts["critic"] = Subdirectory("critic", {"learner": critic.own})
        return parts

    def resume(self) -> None:
        self.learner.hand_over(self.engine)
        self._skipped = bool(read_metrics(self.run.directory.path)[-1]["skipped"])

    def reason_to_end(self) -> str | None:
        return self.probes.reason_to_end([record["results"] for record in self.run.ledger.evaluations()])

    def notes(self) -> list[str]:
        environment = self.environment
        lines = [*batch_arithmetic(self.config), *describe(self.config, self.learner.lora, self.learner.ranks)]
        if self.config.model.path is not None:
            sampling = self.config.sampling
            checkpoint = resolve_checkpoint(Path(self.config.model.path))
            lines += sampling_notes(checkpoint, sampling.temperature, sampling.top_p, sampling.top_k)
        if environment.pool.order.read_as:
            lines.append(f"records: {environment.pool.order.read_as}")
        lines += asynchrony_notes(self.config)
        if self.tools.sandboxes is not None:
            lines.append(f"sandbox: {self.tools.sandboxes.describe()}")
        if environment.overlong:
            context, limit = self.learner.model.config.context_tokens, self.config.sampling.max_new_tokens
            longest = environment.prompts.prompt_limit(context, limit)
            why = (
                "the environment's budget.prompt_tokens"
                if longest == environment.budget.prompt_tokens
                else f"and with completions of {limit} they do not fit the model's context of {context}"
            )
            lines.append(
                f"{environment.overlong} of {environment.pool.size} problems are left out: their prompts have more than {longest} "
                f"tokens, {why}"
            )
        return lines

    def _advance_curriculum(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Gives the step's rates to the curriculum, which may open its next stage. Returns the stage and the reward weights that
        this step was graded by, as metrics; empty without a curriculum."""
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

    def _record_samples(
        self, step: int, rollouts: Rollouts, experience: Experience | None, tokens: Mapping[str, Tensor]
    ) -> None:
        """Writes the step's first group to the samples file or, where all are wanted, its samples and their columns."""
        if self._recorder is None:
            group = rollouts.groups[0].trajectories
            self.run.samples(step, (t.record(step, self.tokenizer.decode(t.token_ids)) for t in group))
            return
        recorded = self._recorder.record(step, rollouts, experience, tokens)
        if self._recorder.fills(self.run.samples(step, recorded.samples, recorded.columns)):
            self.run.alert(
                step,
                f"samples/ has reached monitor.samples_mb = {self.config.monitor.samples_mb}: from here on only the first group of "
                "a step is recorded",
            )

    def _record(self, step: int, rollouts: Rollouts, metrics: Mapping[str, float]) -> None:
        """Writes a spike with its prompts and samples to spikes.jsonl, and an alert at the first of consecutive steps without an
        update."""
        if metrics["skipped"] and not self._skipped:
            self.run.alert(step, f"{rollouts.why_nothing()}: no optimizer step was taken")
        self._skipped = bool(metrics["skipped"])
        if rollouts.alert is not None:
            self.run.alert(step, rollouts.alert)
        if spikes := spikes_in(metrics, self.config.monitor.kl.above):
            decode = self.tokenizer.decode
            self.run.ledger.spike(spike_record(step, spikes, metrics, rollouts.kept_samples, self.learner, decode))

    def _record_routing(self, step: int, shares: Mapping[str, NDArray[np.float64]]) -> None:
        """Records each source's share of the experts' load, at the first step, the last, and each that an evaluation follows. Does
        nothing if the step's samples come from one source."""
        every = self.evaluate_every
        if len(shares) > 1 and (step in (1, self.config.run.steps) or (every and step % every == 0)):
            self.run.ledger.routing(step, {source: shares_YE.tolist() for source, shares_YE in shares.items()})
