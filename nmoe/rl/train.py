"""GRPO and related policy-gradient methods. Each step samples a group of completions per prompt, grades them, and raises the
probability of those above the group's mean. `nmoe rl train CONFIG`

Shao et al. 2024 (arXiv:2402.03300), algorithm 1, in the style of R1-Zero: all rewards come from verifiers. `PolicyGradient.step` is
one step. The variants that [algorithm] names differ in their advantage and in their loss; a [critic] makes it PPO (critic.py), and
[distillation] adds a teacher (teacher.py).
"""

# Shapes: B samples, S sequences (the branches of samples), T predicting positions, R rewards of a sample.

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nmoe.config.arithmetic import batch_arithmetic
from nmoe.config.commands.rl import RLConfig
from nmoe.config.environment import reseeded
from nmoe.config.tables.algorithm import AlgorithmSection, BatchSection, CriticSection
from nmoe.config.tables.rollout import SamplingSection
from nmoe.engine.function import FunctionEngine, GenerateFunction
from nmoe.engine.ranks import sampling_engine
from nmoe.envs.environment import Environment
from nmoe.envs.rewards.scored import attach_scorers
from nmoe.envs.tools.runtime import ToolRuntime
from nmoe.eval.probes import Probes, probes_of
from nmoe.generation import sampling_notes
from nmoe.learner.advantages import advantage, gdpo
from nmoe.learner.batch import Batch
from nmoe.learner.learner import Learner
from nmoe.learner.token_advantages import process_supervision, scored_sums
from nmoe.parallel.gang import everywhere
from nmoe.recipes.run_loop import HeldOut, Recipe, Run, Step, open_run
from nmoe.recipes.setup import (
    describe,
    load_tokenizer,
    settle,
)
from nmoe.rl.critic import Critic
from nmoe.rl.effect import effect, tails
from nmoe.rl.episodes import with_steps_of_episodes
from nmoe.rl.experience import (
    Experience,
    differs,
    group_ids,
    judged,
    minibatches,
    policy_batch,
    reward_divergence,
    sample_rewards,
    step_rewards,
    token_advantages,
    trained_experience,
)
from nmoe.rl.metrics import joined_passes, joined_steps, rollout_metrics, shown, update_metrics
from nmoe.rl.policy import own_loss, policy_learner, policy_objective
from nmoe.rl.reference import Reference
from nmoe.rl.rollouts import Rollouts, RolloutSampler
from nmoe.rl.spikes import spike_record, spikes_in
from nmoe.rl.task_routing import routing_by_source, routing_metrics
from nmoe.rl.teacher import Teacher
from nmoe.runs.ledger import read_metrics
from nmoe.runs.resolve import resolve_checkpoint
from nmoe.runs.state import Files, JsonPart, Part, Subdirectory
from nmoe.text.tokenizer import Tokenizer
from nmoe.trajectory import Group
from nmoe.verifier.scorers import RewardModel, load_scorer, load_step_scorer


def train(config: RLConfig, generate_fn: GenerateFunction | None = None) -> Path:
    """Runs the configuration to its last step and returns the run directory. `generate_fn` samples in place of the engine. Raises
    KeyboardInterrupt, with a checkpoint saved, where a signal asked it to stop."""
    config, threads = settle(config)
    tokenizer = load_tokenizer(config.model)
    environment = Environment.from_settings(reseeded(config.environment, config.run.seed), tokenizer)
    config = with_steps_of_episodes(config, environment.pool.size)
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
        environment.token_limit(config.sampling.max_new_tokens),
        sizes=config.batch,
        seed=config.run.seed,
        reference=everywhere(Reference.build, config, learner, tokenizer),
        critic=Critic.build(config, learner, tokenizer),
        teacher=Teacher.build(config, learner.model.config, tokenizer),
    )
    context_tokens = learner.model.config.context_tokens
    environment.leave_out_overlong(context_tokens, config.sampling.max_new_tokens)
    with ExitStack() as stack:
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
        run = stack.enter_context(open_run(config, threads, around=tools.provenance()))
        run.follow(PolicyGradient(config, run, tokenizer, environment, tools, asked, policy, generate_fn))
    return run.directory.path


class PolicyGradient(Recipe):
    """The algorithm, and its state: policy, engine, and the position in the environment."""

    def __init__(
        self,
        config: RLConfig,
        run: Run,
        tokenizer: Tokenizer,
        environment: Environment,
        tools: ToolRuntime,
        probes: Probes,
        policy: PolicyUpdate,
        generate_fn: GenerateFunction | None = None,
    ) -> None:
        self.config, self.run, self.tokenizer = config, run, tokenizer
        self.environment, self.tools, self.probes = environment, tools, probes
        self.policy, self.learner = policy, policy.learner
        model = self.learner.model
        self.engine = sampling_engine(self.learner, config.engine.max_sequences, config.engine.cache_mb)
        self.sampler = RolloutSampler.build(
            config,
            run.directory,
            tokenizer,
            environment,
            tools,
            self.engine
            if generate_fn is None
            else FunctionEngine(self.engine, generate_fn, lambda: self.learner.version, model.config),
            self.learner,
            self._carries_signal,
        )
        self.evaluate_every, self.evaluate_first = probes.every_steps, bool(probes)
        self._at = 0  # the step that was taken last
        self.experts = model.config.routed_experts
        self._skipped = False  # whether the last step was, so that of several in a row the first is told

    def step(self, step: int) -> Step:
        """Samples and grades a group of completions per prompt, turns their rewards into advantages, updates the policy, and
        publishes its weights."""
        began, self._at = time.perf_counter(), step
        # A cached prefix of an evaluation, or of a step that published nothing, would be missing in a resumed run.
        self.engine.forget_prefixes()
        rollouts = self.sampler.sample(step)
        learn_began = time.perf_counter()
        experience = self.policy.experience(rollouts.kept)
        updated = self.policy.update(step, experience)
        publish_began = time.perf_counter()
        # While a critic warms up the policy takes no step, and the engine has its weights already.
        if "learning_rate" in updated:
            self.learner.publish(self.engine).result()
        times = {"time_learn_s": publish_began - learn_began, "time_sync_s": time.perf_counter() - publish_began}
        if self.policy.reference is not None:
            self.policy.reference.renew(step)
        metrics = {**rollout_metrics(rollouts.trajectories), **rollouts.metrics(), **updated}
        shares = routing_by_source(rollouts.trajectories, self.experts)
        metrics |= routing_metrics(shares)
        metrics["skipped"] = float(not updated)
        metrics |= self._advance_curriculum(step, metrics)
        metrics |= {**rollouts.times(), **times, "time_step_s": time.perf_counter() - began}
        self._record(step, rollouts, metrics)
        self._record_routing(step, shares)
        return Step(metrics, shown(metrics))

    def evaluate(self) -> HeldOut | None:
        """The share of held-out problems solved, the same problems each time. Raises GradingError with its sample saved."""
        if not self.probes:
            return None
        records = self.probes.evaluate(self._at, self.engine, self.run.directory)
        if not records:
            return None
        return HeldOut({}, "; ".join(self.probes.notes(records)), records)

    def parts(self) -> dict[str, Part]:
        reference, critic = self.policy.reference, self.policy.critic
        parts: dict[str, Part] = {
            "learner": self.learner,
            "tokenizer": Files(self.tokenizer.save),
            "environment": JsonPart(self.environment.state, self.environment.load_state),
        }
        if reference is not None and reference.renewed:
            parts["reference"] = Subdirectory("reference", {"model": reference})
        if critic is not None and critic.own is not None:
            parts["critic"] = Subdirectory("critic", {"learner": critic.own})
        if self.sampler.focus is not None:
            rates = self.sampler.focus.rates
            parts["focus"] = JsonPart(lambda: rates, rates.update)
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
        if self.tools.sandboxes is not None:
            lines.append(f"sandbox: {self.tools.sandboxes.describe()}")
        if environment.overlong:
            context, limit = self.learner.model.config.context_tokens, self.config.sampling.max_new_tokens
            longest = environment.prompt_limit(context, limit)
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

    def _carries_signal(self, group: Group) -> bool:
        """Whether the advantages of a group can differ from 0. With a teacher, every group carries signal, even if all rewards
        are equal."""
        algorithm = self.config.algorithm
        if not algorithm.in_groups or self.config.distillation is not None:
            return True
        return differs(group, algorithm, self.policy.token_limit)

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
        """Records the step's first group as samples, the first of several steps without an update, and a spike with the prompts
        and samples that it came from."""
        if metrics["skipped"] and not self._skipped:
            self.run.alert(step, f"{rollouts.why_nothing()}: no optimizer step was taken")
        self._skipped = bool(metrics["skipped"])
        group = rollouts.groups[0].trajectories
        self.run.samples(step, (t.record(step, self.tokenizer.decode(t.token_ids)) for t in group))
        if spikes := spikes_in(metrics, self.config.monitor.kl.above):
            decode = self.tokenizer.decode
            self.run.ledger.spike(spike_record(step, spikes, metrics, rollouts.kept, self.learner, decode))

    def _record_routing(self, step: int, shares: Mapping[str, NDArray[np.float64]]) -> None:
        """Records the experts that each source takes, at the first step, the last, and each that an evaluation follows."""
        every = self.evaluate_every
        if len(shares) > 1 and (step in (1, self.config.run.steps) or (every and step % every == 0)):
            self.run.ledger.routing(step, {source: shares_YE.tolist() for source, shares_YE in shares.items()})


class PolicyUpdate:
    """Runs the optimizer steps for one batch of groups, of the policy and of its critic."""

    def __init__(
        self,
        learner: Learner,
        algorithm: AlgorithmSection,
        sampling: SamplingSection,
        token_limit: int,
        *,
        sizes: BatchSection | None = None,
        seed: int = 0,
        reference: Reference | None = None,
        critic: Critic | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        """`token_limit` is the most tokens that a sample may have. `sizes` says how many optimizer steps there are, by default one,
        and `seed` how groups are dealt out among them."""
        self.learner, self.algorithm, self.token_limit = learner, algorithm, token_limit
        self.reference, self.critic, self.teacher = reference, critic, teacher
        self._constant_length, self._sizes, self._seed = sampling.max_new_tokens, sizes or BatchSection(), seed
        self._objective, self._loss = policy_objective(algorithm, critic), own_loss(algorithm)

    def experience(self, groups: Sequence[Group]) -> Experience | None:
        """The samples of the groups as a batch with advantages; None where there is no group, or where every sample was truncated
        and those are masked."""
        if not groups:
            return None
        algorithm, metrics = self.algorithm, dict[str, float]()
        batch = policy_batch(judged(groups), None, algorithm.aggregation, self._constant_length)
        if self.reference is not None:
            batch = batch.with_reference(self.reference.logprobs(batch))
        # After the first of several updates the learner is no longer the sampler; ratios are to the learner before all of them.
        if self._sizes.updates > 1 or algorithm.correction != "none":
            batch = replace(batch, old_logprobs_T=batch.column(self.learner.logprobs(batch).result()))
        if self.critic is not None:
            batch = self.critic.with_values(batch)
        batch, advantages = with_advantages(
            batch, groups, algorithm, self.token_limit, None if self.critic is None else self.critic.section
        )
        if self.teacher is not None:
            batch, advantages, metrics = self.teacher.advise(batch)
        return trained_experience(batch, advantages, groups, algorithm, self._constant_length, metrics)

    def update(self, step: int, experience: Experience | None) -> dict[str, float]:
        """Takes the optimizer steps and returns their metrics, which are empty without experience."""
        if experience is None:
            return {}
        metrics = experience.metrics
        trains_policy = self.critic is None or not self.critic.warming_up(step)
        passes, steps = [], []
        deal = self._sizes, self.algorithm.aggregation, self._constant_length, self._seed, step
        for minibatch in minibatches(experience, *deal):
            if self.critic is not None:
                self.critic.update(minibatch)
            if trains_policy:
                passes.append(self.learner.forward_backward(minibatch, self._objective).result())
                steps.append(self.learner.optim_step().result())
                if self.critic is not None:
                    self.critic.observe_policy(minibatch, passes[-1])
        if trains_policy:
            result, last = joined_passes(passes), joined_steps(steps)
            metrics |= update_metrics(result, last, experience.advantages, experience.mismatch)
            # Of a single update its own pass has them.
            batch, before_T = experience.batch, experience.batch.old_logprobs_T
            before_N = result.tokens["logprobs"] if before_T is None else before_T[batch.scored_places]
            if batch.reference_logprobs_T is not None:
                metrics |= tails("reference", before_N - batch.reference_logprobs_T[batch.scored_places])
            metrics |= effect(self.learner, batch, before_N, self._loss, self._seed, step)
        if self.critic is not None:
            metrics |= self.critic.metrics(experience.batch)
        return metrics


def with_advantages(
    batch: Batch,
    groups: Sequence[Group],
    algorithm: AlgorithmSection,
    token_limit: int,
    critic: CriticSection | None = None,
) -> tuple[Batch, Tensor]:
    """The batch with advantages and, under gae, the critic's targets; and the advantages that metrics describe: per sample where
    the estimator is one over samples, else per token.

    The batch has one sequence for each branch of the judged samples of the groups, in order, with the reference's log-probabilities
    where the divergence is a reward, and the critic's values where there is one. Estimators over samples give all tokens of a
    sample one advantage, to which the rewards of its steps are added, each from its place on backwards.
    """
    rewards_BR, weights_R = sample_rewards(groups, algorithm, token_limit)
    steps_T = step_rewards(batch, judged(groups))
    if not algorithm.in_groups:
        return token_advantages(batch, rewards_BR[:, 0], steps_T, algorithm, critic)
    ids_B, sample_S = group_ids(groups), batch.sample_ids()
    if algorithm.multi_reward == "gdpo":
        advantages_B = gdpo(rewards_BR, weights_R, ids_B)
    else:
        rewards_B = rewards_BR[:, 0]
        if (divergence_T := reward_divergence(batch, algorithm)) is not None:
            sums_S = scored_sums(divergence_T, batch.scored_T, batch.lengths)
            rewards_B = rewards_B + sums_S.new_zeros(len(rewards_B)).index_add_(0, sample_S, sums_S).float()
        # By default `dr_grpo`: reward - mean of the group.
        advantages_B = advantage(algorithm.advantage)(rewards_B, ids_B)
    advantages_T = torch.repeat_interleave(advantages_B[sample_S], torch.tensor(batch.lengths))
    if bool(steps_T.isnan().all()):
        return replace(batch, advantages_T=advantages_T), advantages_B
    process_T = process_supervision(steps_T, ids_B, batch.scored_T, batch.sample_lengths(), algorithm.step_baseline)
    advantages_T = advantages_T + algorithm.step_reward_coef * process_T
    return replace(batch, advantages_T=advantages_T), advantages_T[batch.scored_T]
